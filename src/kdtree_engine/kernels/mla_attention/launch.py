"""Launches of the attention kernels: how a step's work is cut. No choice here changes a result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import (
    is_hopper,
    launch_options,
    multiprocessors,
    precise,
    small_memory,
)
from kdtree_engine.kernels.mla_attention.blocks import Zones, block_of, zones
from kdtree_engine.kernels.mla_attention.plan import TILE, TablePlan
from kdtree_engine.types import SpanTable

ZONES = zones()
# Partial values of a pass: more rows go in several. A tree is never cut, nor fewer than 64 rows of
# a run, so 64 heads and the widest table (262,144 positions) still take 2.7 GB.
_MOST_BYTES = 1 << 29
_SHORT_CONTEXT = 6144  # keys, see Tiling.short: timed at 4,096 (a gain) and 32,768 (a loss)
_DELAYS = False  # for tests: warps with roles rest at random, see hopper.pause
_OWN_KEYS = 2 * TILE  # a tree row's: 63 committed keys and 64 ancestors at most


@dataclass(frozen=True)
class Tiling:
    """How the kernels cut the work.

    columns: rows x heads a program takes at once. apart: of 8 warps, each half computes the scores
    of half of the keys (else both compute all, if columns are 64). ahead: the next tile's copies
    start before the products of this one. short: columns instead, if fewer, of a request alone
    whose context is short, where wide tiles would leave most of the device idle; the kernel reads
    the context. fold_width, fold_heads, fold_warps: value columns, heads and warps of a program of
    `combine`; fold_batch: blocks that it reads at once. zones: the blocks, not a free choice.
    roles: a tree's blocks by warps with roles of their own (hopper.py), always 64 columns; what
    stands before fold_width is then for causal runs alone.
    """

    columns: int
    warps: int = 8
    stages: int = 2
    apart: bool = False
    ahead: bool = False
    short: int = 64
    fold_width: int = 64
    fold_batch: int = 8
    fold_heads: int = 16
    fold_warps: int = 4
    zones: Zones = ZONES
    roles: bool = False


def tiling(columns: int, small_memory: bool, roles: bool = False) -> Tiling:
    """The tiling for spans of `columns` rows x heads, from benches/kernels.py on an H200.

    small_memory: a program has 99 KB (sm_120), one tile of K2.6 keys and 16 columns. roles: warps
    may have roles (`has_roles`).
    """
    if small_memory:
        return Tiling(16)
    if columns <= 16:  # narrow slices, many reads in flight: few programs fold
        return Tiling(16, stages=3, fold_width=64, fold_batch=16, fold_heads=2)
    wide = Tiling(64, apart=True, ahead=True, roles=roles and columns >= 64)
    if columns <= 64:
        return replace(wide, short=16, fold_batch=16, fold_heads=2)
    if columns <= 128:
        return replace(wide, fold_width=32, fold_batch=16, fold_heads=8)
    return wide


def has_roles(query: Tensor, latents: Tensor, value_dim: int) -> bool:
    """Whether hopper.py serves trees of such rows: the device, the type, the widths, and what the
    copy engine asks of addresses.
    """
    widths = (value_dim, query.shape[2] - value_dim)
    aligned = query.data_ptr() % 16 == 0 and latents.data_ptr() % 16 == 0
    of_k2 = query.dtype == torch.bfloat16 and widths == (512, 64)
    return is_hopper(query.device) and of_k2 and aligned


def attend(
    query: Tensor,
    latents: Tensor,
    plan: TablePlan,
    scale: float,
    value_dim: int,
    cut: Tiling | None = None,
) -> Tensor:
    """See `mla_attention`; `cut` replaces the tiling, for tests and benches."""
    rows, heads, width = query.shape
    spans = int(plan.spans.contexts.shape[0])
    assert latents.shape[1:] == (TILE, width), (query.shape, latents.shape)
    assert query.dtype == latents.dtype and latents.is_contiguous()
    assert rows == plan.rows and rows % spans == 0 and 0 < value_dim < width
    assert plan.spans.contexts.dtype == torch.int32 and plan.spans.pages.dtype == torch.int32
    assert plan.spans.pages.shape[0] == spans and plan.spans.pages.is_contiguous()
    assert plan.slots.shape == (rows,) and plan.slots.dtype == torch.int64
    tree = plan.spans.ancestors
    count = rows // spans
    if tree is None:
        assert spans == 1
    else:
        assert tree.shape == (spans, count) and count <= 64 and tree.dtype == torch.int64
        assert tree.is_contiguous()
    out = query.new_empty(rows, heads, value_dim)
    query = query.contiguous()
    if cut is None:
        roles = tree is not None and has_roles(query, latents, value_dim)
        cut = tiling(count * heads, small_memory(query.device), roles)
    for places, first, end in _passes(plan.spans, count, heads * value_dim * 4, cut):
        own = slice(places.start * count + first, (places.stop - 1) * count + end)
        table = SpanTable(
            plan.spans.contexts[places],
            plan.spans.pages[places],
            None if tree is None else tree[places],
        )
        pass_plan = TablePlan(table, plan.slots[own], own.stop - own.start)
        _launch(query[own], latents, pass_plan, scale, out[own], cut, first)
    return out


def _most_parts(pages: int, table: Zones) -> int:
    """Most blocks that a span of a table `pages` wide can have, and the one its tail begins."""
    return block_of(pages * TILE, table) + 1


def _passes(
    spans: SpanTable, count: int, row_bytes: int, cut: Tiling
) -> list[tuple[slice, int, int]]:
    """(spans, first row, end row) of each pass, so that a pass's partial values fit.

    Trees go whole, as many spans at a time as fit; a causal run goes in cuts of its rows.
    """
    total, width = spans.pages.shape
    fit = max(1, _MOST_BYTES // (row_bytes * _most_parts(width, cut.zones)))
    if spans.ancestors is not None:
        step = max(1, fit // count)
        return [(slice(s, min(s + step, total)), 0, count) for s in range(0, total, step)]
    fit = max(64, fit // 64 * 64)
    return [(slice(0, 1), first, min(first + fit, count)) for first in range(0, count, fit)]


def _launch(
    query: Tensor,
    latents: Tensor,
    plan: TablePlan,
    scale: float,
    out: Tensor,
    cut: Tiling,
    first: int = 0,
) -> None:
    """One pass. query, out: its rows; plan likewise; first: rows of a causal run before them."""
    from kdtree_engine.kernels.mla_attention import kernel

    rows, heads, width = query.shape
    value_dim, table = out.shape[2], plan.spans
    spans, pages = table.pages.shape
    count, columns = rows // spans, rows * heads
    causal = table.ancestors is None
    parts = _most_parts(pages, cut.zones)
    assert parts * columns * value_dim < 1 << 31, (parts, columns)  # offsets of 32 bits
    values = query.new_empty(parts, columns, value_dim, dtype=torch.float32)
    high, mass = query.new_empty(2, parts, columns, dtype=torch.float32)
    scores = query.new_empty(0 if causal else columns, _OWN_KEYS, dtype=torch.float32)
    places = plan.slots.new_empty(0 if causal else rows, _OWN_KEYS)

    tiles = spans * -(-count * heads // cut.columns)
    short = min(cut.short, cut.columns) if spans == 1 and not cut.roles else cut.columns
    most = parts * -(-cut.columns // short)
    chunks, own = _programs(tiles, most, causal, multiprocessors(query.device))
    if tiles * chunks < -(-columns // short):  # a device of few SMs: not a program a narrow tile
        short = cut.columns
    ancestors = plan.slots if table.ancestors is None else table.ancestors
    rounded = scale * math.log2(math.e)
    options = {"PRECISE": precise(query), **launch_options(query)}
    if cut.roles and not causal:
        results = (values, high, mass, scores, places)
        _launch_roles(query, latents, plan, results, rounded, chunks, tiles * chunks, own, cut)
    else:
        kernel.partials[(tiles * chunks + own,)](
            query, latents, plan.slots, table.contexts, table.pages, ancestors, values, high, mass,
            scores, places, rounded, first, count, columns, pages, chunks, tiles * chunks,
            HEADS=heads, KV=value_dim, ROPE=width - value_dim, V=max(16, _power(value_dim)),
            E=max(16, _power(width - value_dim)), ZONES=cut.zones, CAUSAL=causal,
            COLUMNS=cut.columns, STAGES=cut.stages, APART=cut.apart, AHEAD=cut.ahead,
            PTX=query.device.type != "cpu" and not precise(query) and value_dim % 2 == 0,
            SHORT=short, LIMIT=_SHORT_CONTEXT, ROWS=_rows_met(cut.columns, heads),
            num_warps=cut.warps, **options,
        )  # fmt: skip
    folded = min(cut.fold_heads, _power(heads))
    wide = min(cut.fold_width, max(16, _power(value_dim)))
    kernel.combine[(rows * -(-heads // folded), -(-value_dim // wide))](
        values, high, mass, scores, places, latents, out, table.contexts, rounded, first, count,
        columns, HEADS=heads, KV=value_dim, ROPE=width - value_dim, ZONES=cut.zones, CAUSAL=causal,
        FOLDED=folded, WIDTH=wide, BATCH=cut.fold_batch, num_warps=cut.fold_warps, **options,
    )  # fmt: skip


def _launch_roles(
    query: Tensor,
    latents: Tensor,
    plan: TablePlan,
    results: tuple[Tensor, ...],
    scale: float,
    chunks: int,
    shared: int,
    own: int,
    cut: Tiling,
) -> None:
    """The first launch of a pass over trees, on Hopper."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from kdtree_engine.kernels.mla_attention import hopper as kernel

    rows, heads, width = query.shape
    table = plan.spans
    spans, pages = table.pages.shape
    count = rows // spans
    assert has_roles(query, latents, results[0].shape[2]) and cut.columns == TILE, cut
    assert scale > 0, scale  # the largest scaled score is the largest score, scaled

    def tiles_of(x: Tensor, columns: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x, [TILE, columns], kernel.SWIZZLED.value)

    keys, asked = latents.view(-1, width), query.view(-1, width)
    kernel.role_partials[(shared + own,)](
        tiles_of(keys, kernel.PIECE.value), tiles_of(keys, TILE),
        tiles_of(asked, kernel.KV.value), tiles_of(asked, TILE),
        latents, plan.slots, table.contexts, table.pages, table.ancestors, *results, scale, count,
        rows * heads, pages, chunks, shared, HEADS=heads, ZONES=cut.zones,
        ROWS=_rows_met(TILE, heads), DELAYS=_DELAYS, num_warps=4, **launch_options(query),
    )  # fmt: skip


def _programs(tiles: int, most: int, causal: bool, places: int) -> tuple[int, int]:
    """(chunks of each tile's blocks, up to `most`; programs of own keys), so many at a time.

    Together they fill the places, and no more: a program that waits for a place begins when the
    others have almost ended. Own keys are two units of work a tile, shorter than a chunk's. Where
    so few chunks would not fill the places, there are many smaller ones.
    """
    if tiles > places // 4:
        places *= 8
    units = 0 if causal else 2 * tiles
    chunks = max(1, min(most, (places - min(units, 4)) // tiles))
    return chunks, min(units, max(places - tiles * chunks, -(-units // 8)))


def _rows_met(columns: int, heads: int) -> int:
    """A power of two; as many rows as a tile of columns can hold parts of."""
    return columns // heads if columns % heads == 0 else _power((columns - 2) // heads + 2)


def _power(n: int) -> int:
    """The least power of two from n on."""
    return 1 << (n - 1).bit_length()
