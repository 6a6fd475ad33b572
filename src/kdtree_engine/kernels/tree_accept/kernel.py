"""The walk down a draft tree, one program a request.

    tokens, parents, picks [R, N], finite [R, N]  ->  indices [R, length], lengths, next_tokens

From row 0 on: the first row whose parent is the current row and whose token is the pick there. All
that a step needs lies in registers, so it is two reductions of int32 within a warp (redux.sync).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin


@triton.jit
def accept_kernel(
    tokens,  # [R, N] int64
    parents,  # [R, N] int64
    picks,  # [R, N] int64
    finite,  # [R, N] bool, or None
    indices,  # [R, length] int64, from here on outputs
    lengths,  # [R] int64
    next_tokens,  # [R] int64
    broken,  # [R] bool
    N,
    length,
    NP: tl.constexpr,  # powers of two from N and length
    LP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request."""
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    base = request * N
    row = tl.arange(0, NP)
    token = tl.load(tokens + base + row, mask=row < N, other=-1)
    parent = tl.load(parents + base + row, mask=row < N, other=-1).to(tl.int32)
    good = row * 0 + 1
    if finite is not None:
        good = tl.load(finite + base + row, mask=row < N, other=0).to(tl.int32)
    child = parent >= 0
    pick = tl.load(picks + base + parent, mask=child, other=-1)
    above = tl.where(child & (token == pick), parent, -1)  # the row that this one follows, if any
    step = tl.arange(0, LP)
    path = tl.full([LP], -1, tl.int32)
    taken = 0
    here = tl.min(row, 0)  # row 0; NP once the walk has ended
    stopped = here * 0
    while (here < NP) & (taken < length):
        stopped = 1 - tl.max(tl.where(row == here, good, 0), 0)
        follower = tl.min(tl.where(above == here, row, NP), 0)
        if stopped != 0:
            here = here * 0 + NP
        else:
            path = tl.where(step == taken, here, path)
            taken += 1
            here = follower
    # Accepted rows rise. Carrying the last one through the loop gave the row before it on the GPU.
    following = tl.load(picks + base + tl.maximum(tl.max(path, 0), 0))
    tl.store(indices + request * length + step, path.to(tl.int64), mask=step < length)
    tl.store(lengths + request, taken.to(tl.int64))
    tl.store(next_tokens + request, following)
    tl.store(broken + request, stopped != 0)
