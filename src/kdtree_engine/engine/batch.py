"""Turn a step's work into the rows of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kdtree_engine.cache import CacheLayout, page_slots
from kdtree_engine.engine.request import Request
from kdtree_engine.engine.scheduler import Work
from kdtree_engine.sampling import SamplingRows
from kdtree_engine.tree import ancestor_bits
from kdtree_engine.types import DraftTree, Span, StepInputs


@dataclass(frozen=True, eq=False)
class Part:
    """One request's rows in a step.

    rows, logits: its slices of the step's rows and of the wanted logits. slots: where its rows go.
    tree: the draft tree, None for a piece of prompt. samples: whether its logits choose tokens.
    """

    request: Request
    rows: slice
    logits: slice
    slots: list[int]
    tree: DraftTree | None
    samples: bool


@dataclass(frozen=True, eq=False)
class Batch:
    """A step: the parts in order, and the forward's inputs."""

    parts: tuple[Part, ...]
    inputs: StepInputs


def build_batch(
    work: Sequence[Work],
    trees: Sequence[DraftTree | None],
    layout: CacheLayout,
    device: torch.device,
) -> Batch:
    """Lay the requests' rows side by side. A tree's rows go to scratch, a prompt's to its pages."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    parts: list[Part] = []
    spans: list[Span] = []
    for item, tree in zip(work, trees, strict=True):
        request, first, first_logit = item.request, len(tokens), len(wanted)
        if tree is None:
            count = item.chunk
            end = request.context + count
            tokens += request.tokens[request.context : end]
            positions += range(request.context, end)
            own = page_slots(request.pages, request.context, count)
            samples = end == request.prompt_tokens and not request.keep_logits
            wanted += (
                range(first, first + count)
                if request.keep_logits
                else ([first + count - 1] if samples else [])
            )
        else:
            count = tree.nodes + 1
            tokens += [request.tokens[-1], *tree.tokens[1:].tolist()]
            positions += (tree.depths + request.context).tolist()
            scratch = layout.scratch_slot(request.place)
            own = list(range(scratch, scratch + count))
            samples = True
            wanted += range(first, first + count)
        slots += own
        ancestors = None if tree is None else ancestor_bits([tree], count)[0].to(device)
        spans.append(Span(first, count, request.context, request.page_ids, ancestors))
        parts.append(
            Part(
                request,
                slice(first, first + count),
                slice(first_logit, len(wanted)),
                own,
                tree,
                samples,
            )
        )
    inputs = StepInputs(
        _ids(tokens, device),
        _ids(positions, device),
        _ids(slots, device),
        tuple(spans),
        _ids(wanted, device),
    )
    return Batch(tuple(parts), inputs)


def sampling_rows(batch: Batch, device: torch.device) -> SamplingRows:
    """Settings of every wanted row: its request's own, and the position of the token it chooses."""
    settings: list[tuple[float, int, float, float, int]] = []
    for part in batch.parts:
        own = (*part.request.params.filters, part.request.seed)
        settings += [own] * (part.logits.stop - part.logits.start)
    temperature, top_k, top_p, min_p, seed = (
        [row[column] for row in settings] for column in range(5)
    )
    positions = (batch.inputs.positions.index_select(0, batch.inputs.logit_rows) + 1).tolist()
    return SamplingRows.from_lists(
        temperature,
        [int(k) for k in top_k],
        top_p,
        min_p,
        [int(s) for s in seed],
        positions,
        device,
    )


def _ids(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
