"""The rows of one forward: the draft trees of a decode step, or a piece of one prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.engine.request import Request
from kdtree_engine.engine.state import DecodeState, Standing, upload
from kdtree_engine.kernels.tree_build import PlannedTrees
from kdtree_engine.sampling import SamplingRows
from kdtree_engine.types import SpanTable, StepInputs


def tree_inputs(standing: Standing, planned: PlannedTrees) -> StepInputs:
    """B trees of N rows side by side, every row's logits wanted.

    Rows go to the requests' scratch. A padding row of a tree sees itself alone; nothing descends
    from it, so the walk never reaches it.
    """
    rows = planned.rows
    spans = SpanTable(standing.context, standing.pages, planned.ancestors)
    wanted = torch.arange(rows.tokens.numel(), device=rows.tokens.device)
    return StepInputs(
        rows.tokens.flatten(), rows.positions.flatten(), rows.slots.flatten(), spans, wanted
    )


def prompt_inputs(request: Request, count: int, state: DecodeState) -> StepInputs:
    """The next `count` tokens of a prefill as a causal run whose rows go to the request's pages.

    Wanted are the logits of every row for a request that keeps or scores them, else of the last
    row if it chooses a token.
    """
    first, end = request.context, request.context + count
    tokens = upload(torch.tensor(request.tokens[first:end]), state.device)
    positions = torch.arange(first, end, device=state.device)
    pages = state.pages(request.place)
    slots = pages[positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    if request.reads_all_rows:
        wanted = torch.arange(count, device=state.device)
    else:
        last = count - 1 if end == request.fill and request.is_rootless else count
        wanted = torch.arange(last, count, device=state.device)
    context = torch.full((1,), first, dtype=torch.int32, device=state.device)
    return StepInputs(tokens, positions, slots, SpanTable(context, pages[None]), wanted)


def sampling_rows(standing: Standing, positions: Tensor) -> SamplingRows:
    """Settings of B * N rows at `positions`: their request's own, for the token one further on."""
    rows = positions.shape[0] // standing.root.shape[0]
    return SamplingRows(
        standing.temperature.repeat_interleave(rows),
        standing.top_k.repeat_interleave(rows),
        standing.top_p.repeat_interleave(rows),
        standing.min_p.repeat_interleave(rows),
        standing.seed.repeat_interleave(rows),
        positions + 1,
    )
