"""Which keys each row of a step sees, in tiles of 64 with absolute borders.

A row at position p sees positions 0..p of its own path, position q always in tile q // 64 at offset
q % 64, whatever slot of the cache holds it. That placement, not the slot, fixes the order of every
sum, so a tree row adds up exactly what plain decoding would add up at its position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.kernels.launch import has_kernel
from kdtree_engine.types import Span, SpanTable, StepInputs

TILE = PAGE_SIZE


@dataclass(frozen=True, eq=False)
class SpanPlan:
    """Keys of one request's n rows.

    shared [T0 * 64] int64: slots of the tiles that all rows read. shared_hidden [T0, n, 1, 64]
    bool, True where a row does not see the key; None when every row sees all of them.
    tail [n, T1 * 64] int64: slots of the tiles that each row has to itself (a tree's last shared
    tile and its ancestors), tail_hidden [n, T1, 1, 64] likewise; None for a causal run.
    Unused places point at the null slot, whose latent is zero.
    """

    first: int
    count: int
    shared: Tensor
    shared_hidden: Tensor | None
    tail: Tensor | None = None
    tail_hidden: Tensor | None = None

    def rows(self, first: int, end: int) -> SpanPlan:
        """The plan of rows first..end-1 of this span."""
        cut = slice(first, end)
        return SpanPlan(
            self.first + first,
            end - first,
            self.shared,
            None if self.shared_hidden is None else self.shared_hidden[:, cut],
            None if self.tail is None else self.tail[cut],
            None if self.tail_hidden is None else self.tail_hidden[cut],
        )


@dataclass(frozen=True)
class AttentionPlan:
    """The spans' plans, in the step's order; rows after the last span are padding."""

    spans: tuple[SpanPlan, ...]
    rows: int


@dataclass(frozen=True, eq=False)
class TablePlan:
    """A step whose spans the device alone knows; the kernels read the table themselves.

    slots [R] int64: where the step's own latents lie. rows: R, which is S * N.
    """

    spans: SpanTable
    slots: Tensor
    rows: int


def plan_attention(inputs: StepInputs, null_slot: int) -> AttentionPlan | TablePlan:
    """Plan one step. `null_slot` is a cache slot that always holds zeros.

    A span table stays on a CUDA device; on the CPU its values are read and planned like spans.
    """
    rows = int(inputs.tokens.shape[0])
    spans = inputs.spans
    if isinstance(spans, SpanTable):
        if has_kernel(inputs.slots):
            return TablePlan(spans, inputs.slots, rows)
        spans = spans_of(spans, rows)
    return AttentionPlan(tuple(_plan_span(span, inputs.slots, null_slot) for span in spans), rows)


def spans_of(table: SpanTable, rows: int) -> tuple[Span, ...]:
    """The table's spans as host values; `rows` is a causal run's length. Reads the table.

    Rows that the CPU appends to a causal run (it pads one row to two) count as the run's own: no
    row before them sees them.
    """
    spans = []
    for place, context in enumerate(table.contexts.tolist()):
        if table.ancestors is None:
            count, ancestors = rows, None
        else:
            count, ancestors = int(table.ancestors.shape[1]), table.ancestors[place]
        covered = context + (count if ancestors is None else 0)
        pages = table.pages[place, : -(-covered // PAGE_SIZE)].long()
        spans.append(Span(place * count, count, context, pages, ancestors))
    return tuple(spans)


def _plan_span(span: Span, slots: Tensor, null_slot: int) -> SpanPlan:
    own = slots[span.first : span.first + span.count]
    if span.ancestors is None or span.count == 1:
        return _causal(span, own, null_slot)
    return _tree(span, own, null_slot)


def _context_slots(pages: Tensor, count: int) -> Tensor:
    offsets = torch.arange(PAGE_SIZE, device=pages.device)
    return (pages[: -(-count // PAGE_SIZE), None] * PAGE_SIZE + offsets).flatten()[:count]


def _causal(span: Span, own: Tensor, null_slot: int) -> SpanPlan:
    """Row i sees the context and rows 0..i."""
    total = span.context + span.count
    keys = own.new_full((-(-total // TILE) * TILE,), null_slot)
    keys[: span.context] = _context_slots(span.pages, span.context)
    keys[span.context : total] = own
    places = torch.arange(keys.shape[0], device=own.device)
    last = torch.arange(span.context, total, device=own.device)
    hidden = (places[None, :] > last[:, None]).view(span.count, -1, 1, TILE).transpose(0, 1)
    return SpanPlan(span.first, span.count, keys, hidden)


def _tree(span: Span, own: Tensor, null_slot: int) -> SpanPlan:
    """Full context tiles are shared; the open tile and the ancestors are gathered for each row."""
    assert span.ancestors is not None
    closed = span.context // TILE * TILE
    context = _context_slots(span.pages, span.context)
    rows = torch.arange(span.count, device=own.device)
    seen = (span.ancestors[:, None] >> rows) & 1  # [n, n], ancestors rise with depth
    lengths = span.context - closed + seen.sum(1)  # [n] keys in each row's tail
    width = -(-int(lengths.max()) // TILE) * TILE
    tail = own.new_full((span.count, width), null_slot)
    tail[:, : span.context - closed] = context[closed:]
    row, ancestor = seen.nonzero(as_tuple=True)
    place = span.context - closed + (torch.cumsum(seen, 1) - 1)[row, ancestor]
    tail[row, place] = own[ancestor]
    hidden = torch.arange(width, device=own.device)[None, :] >= lengths[:, None]
    hidden = hidden.view(span.count, -1, 1, TILE)
    return SpanPlan(span.first, span.count, context[:closed], None, tail, hidden)
