"""parts[s, r, n] = sum over segment s of K of x[r, k] w[n, k], float32.

The weight is the M operand of the MMA and the rows of x its N side, which may be as narrow as 8: a
decode step has few rows. Weight tiles of 64 x 64 lie in memory in the order in which a program
reads them, so every load is one contiguous run. FP8 tiles are words of two inputs
(kernels/fp8/kernel.py), one float32 scale a tile; the weight is value * scale, rounded
to x's dtype.

Order of summation: inside a segment one accumulator runs over K; segments are added in order, by
whoever reads the parts, or here when one program takes them all (SPLIT false: there is one part,
the total). Both give the same bits, and neither depends on BLOCK_N, BLOCK_T or BLOCK_K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.fp8.kernel import planes
from kdtree_engine.kernels.prologue import begin, product


@triton.jit
def segment_sum(
    x_ptr, w_ptr, scale_ptr, first, end, K, x_offset, w_offset, scale_offset, ok,
    FP8: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T] of K blocks first..end-1.

    x_offset [BLOCK_K, BLOCK_T] and w_offset [BLOCK_N, BLOCK_K]: int32 places at K = 0; 64-bit
    pointers a thread would cost it two registers an element. FP8 takes the 32 inputs of a plane at
    a time: x_offset [32, BLOCK_T], w_offset [BLOCK_N, 32], of words. scale_offset [BLOCK_N] is the
    same for all rows of a tile: scales are loaded ahead only if they come as the tiles do.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    if FP8:
        k = tl.arange(0, 32)
        for block in tl.range(first, end, BLOCK_K // 64, num_stages=STAGES):
            for i in tl.static_range(BLOCK_K // 64):
                words = tl.load(w_ptr + (block + i) * 2048 + w_offset)
                scale = tl.load(scale_ptr + (block + i) + scale_offset)
                both = planes(words, scale[:, None], x_ptr.dtype.element_ty, PTX)
                for j in tl.static_range(2):
                    start = (block + i) * 64 + j * 32
                    inside = (start + k < K)[:, None] & ok[None, :]
                    rows = tl.load(x_ptr + start + x_offset, mask=inside, other=0.0)
                    acc = product(both[j], rows, acc, PRECISE)
    else:
        k = tl.arange(0, BLOCK_K)
        for block in tl.range(first, end, BLOCK_K // 64, num_stages=STAGES):
            weight = tl.load(w_ptr + block * 4096 + w_offset)
            inside = (block * 64 + k < K)[:, None] & ok[None, :]
            rows = tl.load(x_ptr + block * 64 + x_offset, mask=inside, other=0.0)
            acc = product(weight, rows, acc, PRECISE)
    return acc


@triton.jit
def linear_parts(
    x_ptr, w_ptr, scale_ptr, out_ptr, R, K, BLOCKS, SEGMENT, SEGMENTS, WIDTH,
    FP8: tl.constexpr, PTX: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x [R, K]; w [WIDTH / 64, BLOCKS, 64, 64]; out [SEGMENTS or 1, R, WIDTH] float32.

    FP8: w [WIDTH / 64, BLOCKS, 64, 32] int16 and scale [WIDTH / 64, BLOCKS] float32.
    grid (WIDTH / BLOCK_N, SEGMENTS if SPLIT else 1, cdiv(R, BLOCK_T)).
    """
    begin(PDL)
    # Elements of w in a row of a tile; what w_offset and x_offset span along K.
    ROW: tl.constexpr = 32 if FP8 else 64
    SPAN: tl.constexpr = 32 if FP8 else BLOCK_K
    part = tl.program_id(1)
    first_row = tl.program_id(2) * BLOCK_T
    n, t, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T), tl.arange(0, SPAN)
    ok = first_row + t < R
    tile = tl.program_id(0).to(tl.int64) * (BLOCK_N // 64) * BLOCKS
    w = w_ptr + tile * (64 * ROW)
    w_row = (n // 64) * (BLOCKS * (64 * ROW)) + (n % 64) * ROW
    w_offset = w_row[:, None] + ((k // ROW) * (64 * ROW) + k % ROW)[None, :]
    scale = scale_ptr + tile if FP8 else w
    scale_offset = (n // 64) * BLOCKS
    x = x_ptr + first_row.to(tl.int64) * K
    x_offset = t[None, :] * K + k[:, None]
    if SPLIT:
        start = part * SEGMENT
        end = tl.minimum(start + SEGMENT, BLOCKS)
        total = segment_sum(
            x, w, scale, start, end, K, x_offset, w_offset, scale_offset, ok,
            FP8, PTX, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, PRECISE,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for s in range(SEGMENTS):
            start = s * SEGMENT
            end = tl.minimum(start + SEGMENT, BLOCKS)
            total += segment_sum(
                x, w, scale, start, end, K, x_offset, w_offset, scale_offset, ok,
                FP8, PTX, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, PRECISE,
            )  # fmt: skip
    out = out_ptr + (part.to(tl.int64) * R + first_row) * WIDTH + tl.program_id(0) * BLOCK_N
    tl.store(out + t[None, :] * WIDTH + n[:, None], total, mask=ok[None, :])


@triton.jit
def sum_parts(parts, out, R, N, WIDTH, SEGMENTS, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[r, n] = parts[0, r, n] + parts[1, r, n] + ... in order. grid (R, cdiv(N, BLOCK))."""
    begin(PDL)
    r = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + r * WIDTH + n, mask=n < N, other=0.0)
    for s in range(1, SEGMENTS):
        total += tl.load(parts + (s * R + r) * WIDTH + n, mask=n < N, other=0.0)
    tl.store(out + r * N + n, total.to(out.dtype.element_ty), mask=n < N)
