"""parts[s, r, n] = sum over segment s of K of x[r, k] w[n, k], float32.

The weight is the M operand of the MMA and the rows of x its N side, which may be as narrow as 8: a
decode step has few rows. Weight tiles of 64 x 64 lie in memory in the order in which a program
reads them, so every load is one contiguous run.

Order of summation: inside a segment one accumulator runs over K; segments are added in order, by
whoever reads the parts, or here when one program takes them all (SPLIT false: there is one part,
the total). Both give the same bits, and neither depends on BLOCK_N, BLOCK_T or BLOCK_K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin, product


@triton.jit
def segment_sum(
    x, w, first, end, K,
    ok, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T] of K blocks first..end-1. x, w: pointers to [BLOCK_K, BLOCK_T] and
    [BLOCK_N, BLOCK_K] at K = 0.
    """
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for block in tl.range(first, end, BLOCK_K // 64, num_stages=STAGES):
        weight = tl.load(w + block * 4096)
        inside = (block * 64 + k < K)[:, None] & ok[None, :]
        rows = tl.load(x + block * 64, mask=inside, other=0.0)
        acc = product(weight, rows, acc, PRECISE)
    return acc


@triton.jit
def linear_parts(
    x_ptr, w_ptr, out_ptr, R, K, BLOCKS, SEGMENT, SEGMENTS, WIDTH,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [R, K]; w [WIDTH / 64, BLOCKS, 64, 64]; out [SEGMENTS or 1, R, WIDTH] float32.

    grid (WIDTH / BLOCK_N, SEGMENTS if SPLIT else 1, cdiv(R, BLOCK_T)).
    """
    begin(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    ok = t < R
    tile = (n // 64).to(tl.int64) * BLOCKS * 4096 + (n % 64) * 64
    w = w_ptr + tile[:, None] + ((k // 64) * 4096 + k % 64)[None, :]
    x = x_ptr + t.to(tl.int64)[None, :] * K + k[:, None]
    if SPLIT:
        first = part * SEGMENT
        end = tl.minimum(first + SEGMENT, BLOCKS)
        total = segment_sum(x, w, first, end, K, ok, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, PRECISE)
    else:
        total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for s in range(SEGMENTS):
            first = s * SEGMENT
            end = tl.minimum(first + SEGMENT, BLOCKS)
            total += segment_sum(
                x, w, first, end, K, ok, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, PRECISE
            )
    out = out_ptr + (part.to(tl.int64) * R + t)[None, :] * WIDTH + n[:, None]
    tl.store(out, total, mask=ok[None, :])


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
