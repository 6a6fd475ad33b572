"""query[r, h] = [W_UK[h]^T nope(r, h) | rotated pe(r, h)], from the query product's parts.

The weight is the M operand, [latent columns, nope]; rows are the narrow side. K is one dot: nope
is at most 128 or so. The last column tile of each head turns the rotary part instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.latent_rows.kernel import added, rotated
from kdtree_engine.kernels.prologue import begin, product


@triton.jit
def absorb_rows(
    parts, key_up, cos, sin, out, R, WIDTH,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr, SEGMENTS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    PRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts [SEGMENTS, R, WIDTH], head h at column h * (D + P): nope [D], then pe [P].

    key_up [H, C, D] in memory; cos, sin [R, P]; out [R, H, C + P].
    grid (H, cdiv(C, BLOCK_C) + 1, cdiv(R, BLOCK_T)).
    """
    begin(PDL)
    h = tl.program_id(0)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = t < R
    row = t.to(tl.int64)
    target = out + (row * H + h) * (C + P)
    source = parts + row * WIDTH + h * (D + P)
    if tl.program_id(1) * BLOCK_C < C:
        c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        d = tl.arange(0, BLOCK_D)
        weight = tl.load(
            key_up + h * (C * D) + c[:, None] * D + d[None, :],
            mask=(c < C)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        inside = (d < D)[:, None] & ok[None, :]
        nope = added(source[None, :] + d[:, None], inside, R, WIDTH, SEGMENTS)
        nope = nope.to(key_up.dtype.element_ty)
        acc = tl.zeros((BLOCK_C, BLOCK_T), tl.float32)
        acc = product(weight, nope, acc, PRECISE)
        place = target[None, :] + c[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(c < C)[:, None] & ok[None, :])
    else:
        p = tl.arange(0, BLOCK_P)[:, None]
        turned = (p < P) & ok[None, :]
        turn = tl.load(cos + row[None, :] * P + p, mask=turned, other=0.0)
        lean = tl.load(sin + row[None, :] * P + p, mask=turned, other=0.0)
        pe = rotated(source[None, :] + D, p, turned, turn, lean, R, WIDTH, SEGMENTS)
        tl.store(target[None, :] + C + p, pe.to(out.dtype.element_ty), mask=turned)
