"""Ancestor bits [R, N] int64 from parents [R, N] int64, one warp a request.

Parents come before their children, so one pass over the rows suffices: a row's bits are its own
and its parent's. The bits lie in two int32 words a row, one row a lane or two; a warp fetches a
row's word with one sum of int32 (redux.sync).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin


@triton.jit
def mask_kernel(parents, bits, N, NP: tl.constexpr, PDL: tl.constexpr):
    """One request; NP is a power of two, N <= NP <= 64."""
    begin(PDL)
    base = tl.program_id(0).to(tl.int64) * N
    row = tl.arange(0, NP)
    low = tl.where(row < 32, 1, 0) << (row & 31)
    high = tl.where(row >= 32, 1, 0) << (row & 31)
    child = 1
    while child < N:
        above, fresh = row == tl.load(parents + base + child), row == child
        low |= tl.where(fresh, tl.sum(tl.where(above, low, 0), 0), 0)
        high |= tl.where(fresh, tl.sum(tl.where(above, high, 0), 0), 0)
        child += 1
    whole = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    tl.store(bits + base + row, whole, mask=row < N)
