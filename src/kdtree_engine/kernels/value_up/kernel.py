"""out[r, h, j] = sum over c of mixed[r, h, c] W_UV[h, c, j]: one accumulator over c in order."""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin, product


@triton.jit
def value_up_rows(
    mixed, weight_ptr, out, R,
    H: tl.constexpr, C: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, PRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """mixed [R, H, C]; weight [H, V, C] in memory; out [R, H, V].

    grid (H, cdiv(V, BLOCK_V), cdiv(R, BLOCK_T)).
    """
    begin(PDL)
    h = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_C)
    row = t.to(tl.int64)
    x = mixed + (row * H + h)[None, :] * C + c[:, None]
    w = weight_ptr + h * (V * C) + v[:, None] * C + c[None, :]
    acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    for first in tl.static_range(0, C, BLOCK_C):
        weight = tl.load(w + first, mask=(v < V)[:, None] & (first + c < C)[None, :], other=0.0)
        rows = tl.load(x + first, mask=(first + c < C)[:, None] & (t < R)[None, :], other=0.0)
        acc = product(weight, rows, acc, PRECISE)
    place = out + (row * H + h)[None, :] * V + v[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(v < V)[:, None] & (t < R)[None, :])
