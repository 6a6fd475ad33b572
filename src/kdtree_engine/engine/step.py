"""One step of the engine: draft, build, forward, sample, walk, commit. Plain decoding is the tree
with only a root, and a piece of prompt is a causal run: there is no second loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kdtree_engine.cache import CachePool, commit_paths, page_slots
from kdtree_engine.drafter.base import Drafter, DraftState, Observation
from kdtree_engine.engine.batch import Part, build_batch, sampling_rows
from kdtree_engine.engine.policy import TreePolicy
from kdtree_engine.engine.request import StepTrace
from kdtree_engine.engine.scheduler import Scheduler, Work
from kdtree_engine.model import Kimi
from kdtree_engine.sampling import Sampled, sample
from kdtree_engine.tree import accept
from kdtree_engine.types import AcceptedPath, DraftTree


class StepParts(Protocol):
    """What a step works with; the engine is one."""

    target: Kimi
    drafter: Drafter
    pool: CachePool
    policy: TreePolicy
    scheduler: Scheduler
    device: torch.device


class Stopwatch:
    """Seconds per phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step did for one request: its new tokens, and its rows to commit, in order."""

    part: Part
    tokens: list[int]
    path: list[int]
    trace: StepTrace | None = None


def run_step(engine: StepParts) -> list[StepResult]:
    """Advance every running request by one tree, or by one piece of its prompt."""
    work = engine.scheduler.schedule()
    if not work:
        return []
    watch = Stopwatch()
    layout = engine.pool.layout
    trees = draft(engine, work, watch)
    batch = build_batch(work, trees, layout, engine.device)
    watch.lap("batch")
    reserved = (layout.null_slot, layout.spill_slot)
    out = engine.target.forward(
        batch.inputs, engine.pool.latents, reserved, engine.drafter.tap_layers
    )
    watch.lap("forward")
    picks = sample(out.logits, sampling_rows(batch, engine.device))
    watch.lap("sample")
    results = [advance(part, out.logits, picks) for part in batch.parts]
    commit(engine, results, out.taps)
    watch.lap("commit")
    for result in results:
        result.part.request.stats.add_seconds(watch.seconds)
    return results


def draft(engine: StepParts, work: Sequence[Work], watch: Stopwatch) -> list[DraftTree | None]:
    """A tree for every decoding request, None for a piece of prompt."""
    decoding = [item.request for item in work if not item.chunk]
    states = [
        DraftState(one.id, one.tokens, one.context, one.page_ids, one.seed, one.params.temperature)
        for one in decoding
    ]
    blocks = engine.drafter.propose(states, engine.policy.nodes) if states else []
    watch.lap("draft")
    # A path of depth d emits d + 1 tokens, so nodes deeper than remaining - 1 could not be used.
    trees = iter(
        [
            engine.policy.tree(block, one.remaining - 1)
            for block, one in zip(blocks, decoding, strict=True)
        ]
    )
    watch.lap("tree")
    return [None if item.chunk else next(trees) for item in work]


def advance(part: Part, logits: Tensor, picks: Sampled) -> StepResult:
    """Walk one request's rows and emit what the target chose."""
    request, tree = part.request, part.tree
    if request.keep_logits:
        request.logits.append(logits[part.logits])
    if tree is None and not part.samples:
        return StepResult(part, [], list(range(len(part.slots))))
    tokens, finite = picks.tokens[part.logits].cpu(), picks.finite[part.logits].cpu()
    if tree is None:
        if not bool(finite[0]):
            request.fail(_non_finite(request.prompt_tokens))
            return StepResult(part, [], [])
        return StepResult(part, request.emit([int(tokens[0])]), list(range(len(part.slots))))
    path = accept(tree, tokens)
    rows = list(path.indices)
    # The pick of a row is the token of the next row on the path, or the token after its last row.
    good = rows[: first_false(finite[rows])]
    root = request.tokens[-1]
    kept = request.emit(tokens[good].tolist())
    if len(good) < len(rows) and request.finish_reason is None:
        request.fail(_non_finite(request.context + len(good) + 1))
    if not kept:
        return StepResult(part, [], [])
    request.stats.add_step(accepted=len(kept) - 1, nodes=tree.nodes)
    # The root stands for the first emitted token, and the last emitted one is the next root.
    walked = AcceptedPath(rows[: len(kept)], kept[-1])
    return StepResult(part, kept, rows[: len(kept)], StepTrace(root, tree, walked))


def first_false(flags: Tensor) -> int:
    """Index of the first False of flags [k], or k."""
    return int(torch.cumprod(flags.long(), 0).sum())


def commit(engine: StepParts, results: Sequence[StepResult], taps: Tensor | None) -> None:
    """Move accepted rows to their places, show them to the drafter, publish full pages."""
    source: list[int] = []
    destination: list[int] = []
    seen: list[Observation] = []
    for result in results:
        part, request = result.part, result.part.request
        slots = page_slots(request.pages, request.context, len(result.path))
        if part.tree is not None:
            source += [part.slots[row] for row in result.path]
            destination += slots
        if slots:
            rows = [part.rows.start + row for row in result.path]
            seen.append(
                Observation(
                    request.id, request.context, slots, None if taps is None else taps[rows]
                )
            )
        request.context += len(slots)
        request.is_prefill = request.context < request.prompt_tokens
    commit_paths(engine.pool, source, destination)
    if seen:
        engine.drafter.observe(seen)
    for result in results:
        engine.scheduler.publish(result.part.request)


def _non_finite(position: int) -> str:
    return (
        f"the model gave logits that are not finite for position {position}: the weights or the "
        "cache hold NaN or infinite values, or the dtype is too narrow for this model"
    )
