"""Rows of many cache tensors moved at once; every row is read before any is written.

A cache row is `words` 32-bit words. `bases` [layers] int64 holds the layers' addresses. A program
holds all rows of one move, COLUMNS words of each: within a layer, rows of different columns cannot
meet, so reading all of them before writing is decided inside the program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin


@triton.jit
def _cache(bases, ALIGNED: tl.constexpr):
    """This program's layer."""
    base = tl.load(bases + tl.program_id(0))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base.to(tl.pointer_type(tl.int32))


@triton.jit
def _move(cache, source, destination, moved, words, COLUMNS: tl.constexpr):
    """Words of this program's columns from rows `source` to rows `destination`, where `moved`."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = moved[:, None] & (column < words)[None, :]
    value = tl.load(cache + source[:, None] * words + column[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(cache + destination[:, None] * words + column[None, :], value, mask=mask)


@triton.jit
def rows_kernel(
    bases,  # [layers] int64
    source,  # [count] int64 slots
    destination,  # [count] int64 slots
    count,
    words,
    ROWS: tl.constexpr,  # a power of two from count on
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether 16 divides every address
    PDL: tl.constexpr,
):
    """Grid (layers, column slices)."""
    begin(PDL)
    cache = _cache(bases, ALIGNED)
    row = tl.arange(0, ROWS)
    moved = row < count
    old = tl.load(source + row, mask=moved, other=0)
    new = tl.load(destination + row, mask=moved, other=0)
    _move(cache, old, new, moved, words, COLUMNS)


@triton.jit
def paths_kernel(
    bases,  # [layers] int64
    slots,  # [R, N] int64, scratch slots of the trees' rows
    indices,  # [R, length] int64, accepted rows
    lengths,  # [R] int64
    contexts,  # [R] int32, the first position to write
    pages,  # [R, P] int32
    N,
    length,
    P,
    words,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two from length on
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether 16 divides every address
    PDL: tl.constexpr,
):
    """Grid (layers, column slices, R)."""
    begin(PDL)
    cache = _cache(bases, ALIGNED)
    request = tl.program_id(2).to(tl.int64)
    step = tl.arange(0, ROWS)
    # A load waits for no other that it does not need: each costs most of a microsecond.
    within = step < length
    index = tl.load(indices + request * length + step, mask=within, other=0)
    count = tl.load(lengths + request)
    position = tl.load(contexts + request) + step
    placed = position // PAGE < P
    page = tl.load(pages + request * P + position // PAGE, mask=within & placed, other=0)
    old = tl.load(slots + request * N + index, mask=within & (index >= 0), other=0)
    new = page.to(tl.int64) * PAGE + position % PAGE
    _move(cache, old, new, within & placed & (step < count), words, COLUMNS)
