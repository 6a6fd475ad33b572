"""Drive an engine request by request, recording the logits behind every token it emits."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from e2e.models import Loaded
from kdtree_engine import SamplingParams
from kdtree_engine.cache import CacheLayout, CachePool, allocate_pool, pages_for
from kdtree_engine.config import EngineConfig
from kdtree_engine.drafter.base import Drafter
from kdtree_engine.engine.loop import Engine
from kdtree_engine.engine.request import Request, StepResult, StepTrace, TokenLogProb

CHECK_EVERY = 16  # steps between two integrity checks
MakeDrafter = Callable[[CachePool], Drafter]


@dataclass(frozen=True, eq=False)
class Job:
    """A request: its prompt, its settings, and the step at which it joins. leave: so many steps
    later its caller cancels it. first: the job, joined already, whose prompt it shares.
    """

    prompt: Sequence[int]
    params: SamplingParams
    join: int = 0
    leave: int | None = None
    first: int | None = None


@dataclass(eq=False)
class Run:
    """What a request emitted: tokens, the logits row that chose each, and where that row stood."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    traces: list[StepTrace] = field(default_factory=list)

    @property
    def told(self) -> tuple[list[TokenLogProb], list[TokenLogProb]]:
        """What it was told of its output and its prompt."""
        return self.request.log_probs, self.request.prompt_log_probs


def make_engine(
    loaded: Loaded, make_drafter: MakeDrafter, config: EngineConfig, drafts: bool = False
) -> Engine:
    """A fresh engine on a loaded target, on its device, that keeps the logits of its steps;
    `drafts`: room for a DFlash drafter.
    """
    layout = CacheLayout(config.cache_pages, config.max_requests)
    model, draft = loaded.target.config, loaded.network.config
    pool = allocate_pool(
        layout,
        model.num_layers,
        model.latent_dim,
        loaded.target.embedding.dtype,
        loaded.target.device,
        *((draft.num_layers, (draft.num_kv_heads, draft.head_dim)) if drafts else ()),
    )
    engine = Engine(loaded.target, make_drafter(pool), pool, config)
    engine.runner.keep_logits = True
    return engine


def pages_of(jobs: Sequence[Job]) -> int:
    """Pages that the jobs need together."""
    return sum(pages_for(len(job.prompt) + job.params.max_tokens) for job in jobs)


def scramble(engine: Engine, seed: int) -> None:
    """Hand out pages and places in random order, and poison all memory but the page of zeros."""
    draw = random.Random(f"pages {seed}")
    draw.shuffle(engine.scheduler.allocator._free)
    draw.shuffle(engine.scheduler._places)
    pool = engine.pool
    null_page = pool.layout.null_slot // pool.latents[0].shape[1]
    for layer in (*pool.latents, *pool.draft):
        layer.fill_(torch.nan)
        layer[null_page].zero_()


def run_jobs(engine: Engine, jobs: Sequence[Job], check_every: int = CHECK_EVERY) -> list[Run]:
    """Let the jobs join at their steps and run until all have left; runs in the jobs' order."""
    runs: dict[int, Run] = {}
    waiting = sorted(range(len(jobs)), key=lambda index: jobs[index].join)
    leaving: dict[int, int] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and (jobs[waiting[0]].join <= step or not engine.has_work):
            index = waiting.pop(0)
            runs[index] = _join(engine, jobs[index], runs)
            if jobs[index].leave is not None:
                leaving[index] = step + jobs[index].leave
        for index in [one for one, when in leaving.items() if when <= step]:
            del leaving[index]
            engine.cancel(runs[index].request)
        by_request = {run.request.id: run for run in runs.values()}
        results = engine.step()
        for result in results:
            _record(by_request[result.request.id], result, len(results))
        step += 1
        if step % check_every == 0:
            engine.check_integrity()
    engine.check_integrity()
    return [runs[index] for index in range(len(jobs))]


def _join(engine: Engine, job: Job, runs: Mapping[int, Run]) -> Run:
    first = None if job.first is None else runs[job.first].request
    return Run(engine.add(job.prompt, job.params, after=first))


def _record(run: Run, result: StepResult, beside: int) -> None:
    """Keep the rows that chose the step's tokens: along the accepted path, or the prompt's last."""
    run.tokens += result.tokens
    if not result.tokens:
        return
    assert result.logits is not None
    where = f"one of {beside} requests"
    if result.trace is None:
        run.logits.append(result.logits[-1].clone())
        run.origins.append(f"prompt, {where}")
        return
    tree, path = result.trace.tree, list(result.trace.path.indices)[: len(result.tokens)]
    run.logits += result.logits[path].clone()
    run.origins += [f"row {row} of a tree of {tree.nodes} nodes, {where}" for row in path]
    run.traces.append(result.trace)
