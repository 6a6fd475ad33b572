"""Launches of the attention kernels: how a step's work is cut. No choice here changes a result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import launch_options, multiprocessors, precise
from kdtree_engine.kernels.mla_attention.plan import TILE, TablePlan
from kdtree_engine.types import SpanTable

UNIT_TILES = 2
"""Tiles of a unit: the online recurrence runs inside it. Part of the order that fixes the bits."""
GROUP_UNITS = 8
"""Units of a group, folded in order; then groups are. Part of the order that fixes the bits."""

UNIT_KEYS = UNIT_TILES * TILE
_TAIL_UNITS = 2  # 127 committed keys and 64 ancestors
_MOST_BYTES = 1 << 29  # of partial values: more rows go in several passes
_COMBINE_WIDTH = 128


@dataclass(frozen=True)
class Tiling:
    """How the kernels cut the work.

    columns: rows x heads a program takes at once. split: programs that share the value columns,
    each computing all scores. waves: programs a device is given at once, in SMs. batch: groups
    that `combine` reads at once. limit: spans of up to so many units in pages are cut into units,
    longer ones into groups; None: as many as leave too few groups to fill the device. apart: of 8
    warps, each half computes half of the scores (else both compute all) at some registers' cost.
    """

    columns: int
    warps: int
    stages: int
    split: int = 1
    waves: int = 2
    limit: int | None = None
    batch: int = 2
    apart: bool = False


def tiling(columns: int, small_memory: bool) -> Tiling:
    """The tiling for spans of `columns` rows x heads.

    small_memory: a block has 99 KB (sm_120): one tile of K2.6 keys and 16 columns of the query.
    """
    if small_memory:
        return Tiling(8 if columns <= 8 else 16, 8, 1)
    # 8 columns would leave wgmma, and with it the double buffering of the keys
    return Tiling(16, 8, 2, apart=True) if columns <= 128 else Tiling(32, 8, 2, apart=True)


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
    cut = cut or tiling(count * heads, _small_memory(query))
    for places, first, end in _passes(plan.spans, count, heads * value_dim * 4, cut, heads, query):
        own = slice(places.start * count + first, (places.stop - 1) * count + end)
        table = SpanTable(
            plan.spans.contexts[places],
            plan.spans.pages[places],
            None if tree is None else tree[places],
        )
        pass_plan = TablePlan(table, plan.slots[own], own.stop - own.start)
        _launch(query[own], latents, pass_plan, scale, out[own], cut, first)
    return out


def _small_memory(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (12, 0)


def _limit(spans: int, columns: int, cut: Tiling, device: torch.device) -> int:
    """Units in pages up to which each unit is a part: beyond, groups fill most of the device."""
    if cut.limit is not None:
        return cut.limit
    programs = spans * -(-columns // cut.columns) * cut.split
    return max(GROUP_UNITS, GROUP_UNITS * 3 * multiprocessors(device) // (4 * programs))


def _most_parts(pages: int, limit: int) -> int:
    """Most parts in pages that a span of a table `pages` wide can have."""
    units = -(-pages * TILE // UNIT_KEYS)
    if units <= limit:
        return units
    return max(limit, units // GROUP_UNITS + GROUP_UNITS - 1)


def _passes(
    spans: SpanTable, count: int, row_bytes: int, cut: Tiling, heads: int, x: Tensor
) -> list[tuple[slice, int, int]]:
    """(spans, first row, end row) of each pass, so that a pass's partial values fit.

    Trees go whole, as many spans at a time as fit; a causal run goes in cuts of its rows.
    """
    total, width = spans.pages.shape
    limit = _limit(1, count * heads, cut, x.device)
    row_bytes *= _most_parts(width, limit) + _TAIL_UNITS
    fit = max(1, _MOST_BYTES // row_bytes)
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
    count = rows // spans
    causal = table.ancestors is None
    limit = _limit(spans, count * heads, cut, query.device)
    parts = _most_parts(pages, limit)
    columns = rows * heads
    stored = parts + (0 if causal else _TAIL_UNITS)
    values = torch.empty(stored, columns, value_dim, dtype=torch.float32, device=query.device)
    high, mass = torch.empty(2, stored, columns, dtype=torch.float32, device=query.device)

    tiles = spans * -(-count * heads // cut.columns) * cut.split
    chunks = max(1, min(parts, cut.waves * multiprocessors(query.device) // tiles))
    shared = tiles * chunks
    tail_columns = 0 if causal else min(cut.columns, 16, max(8, _power(heads)))
    tails = 0 if causal else rows * _TAIL_UNITS * -(-heads // tail_columns) * cut.split
    ancestors = plan.slots if table.ancestors is None else table.ancestors
    options = launch_options(query)
    kernel.partials[(shared + tails,)](
        query, latents, plan.slots, table.contexts, table.pages, ancestors, values, high, mass,
        scale * math.log2(math.e), limit, first, count, columns, pages, chunks, shared, parts,
        HEADS=heads, KV=value_dim, ROPE=width - value_dim, V=max(16, _power(value_dim)),
        E=max(16, _power(width - value_dim)), CAUSAL=causal, COLUMNS=cut.columns,
        TAIL_COLUMNS=tail_columns, SPLIT=cut.split, UNIT=UNIT_TILES, GROUP=GROUP_UNITS,
        STAGES=cut.stages, APART=cut.apart, PRECISE=precise(query), num_warps=cut.warps, **options,
    )  # fmt: skip
    wide = min(_COMBINE_WIDTH, _power(value_dim))
    kernel.combine[(columns, -(-value_dim // wide))](
        values, high, mass, out, table.contexts, ancestors, limit, first, count, columns, parts,
        HEADS=heads, KV=value_dim, CAUSAL=causal, WIDTH=wide, UNIT=UNIT_TILES, GROUP=GROUP_UNITS,
        BATCH=cut.batch, num_warps=2, **options,
    )  # fmt: skip


def _power(n: int) -> int:
    """The least power of two from n on."""
    return 1 << (n - 1).bit_length()
