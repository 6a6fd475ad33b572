"""The contract under pressure: a cache too small for the requests on it, so that they preempt each
other, several samples of one prompt, and callers that leave at any step.

As in contract.py every emitted token, and the logits row that chose it, must equal plain
decoding's; a request that was cancelled is compared as far as it came. Pages and places are checked
after every step. Most requests have sampling options; since penalties and `min_tokens` count the
output, their truth is plain decoding of the very same prompt under the very same settings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from e2e.contract import (
    CHAIN,
    MAIN_AXES,
    OTHER_AXES,
    Report,
    Truth,
    Violation,
    accepted_pairs,
    drafter_maker,
    first_difference,
    plain_truth,
    sampling_params,
    with_options,
)
from e2e.covering import Axes, Row, covering_array
from e2e.drive import Job, make_engine, run_jobs, scramble
from e2e.models import Loaded, Models
from e2e.pretend import Pretend
from kdtree_engine.cache import pages_for
from kdtree_engine.config import EngineConfig
from kdtree_engine.engine.loop import Engine

AXES: Axes = {
    "model": MAIN_AXES["model"],
    "nodes": (0, 2, 7, 15, "chain"),
    "drafter": MAIN_AXES["drafter"],
    "sampling": MAIN_AXES["sampling"],
    "dtype": ("float32", "bfloat16"),
    "chunk": (7, 64, 512),
    "runner": ("direct", "ahead", "captured"),
    # stops would end requests before pages run out; "forbidden" has some, behind min_tokens
    "options": tuple(one for one in OTHER_AXES["options"] if one != "stops"),
}
QUICK_AXES: Axes = {
    **AXES,
    "model": ("groups",),
    "nodes": (7, "chain"),
    "drafter": ("ngram", "replay", "dflash"),
    "sampling": ("p90",),
    "dtype": ("float32",),
    "chunk": (7, 64),
    "options": ("penalties", "forbidden", "log_probs"),
}
REQUESTS = 8
PROMPTS = (40, 52, 33, 57, 47, 75)  # tokens; those of the last are shared by three requests
PLACES = 5
MOST_NEW = 64  # tokens of a request, so that each grows over a page border
LEAST = 40  # their min_tokens, where they have stop tokens
LEAVERS = 2  # requests that are cancelled
# For even and odd seeds: pages besides those of the largest request, and when requests leave. With
# few pages two run at once, and whoever leaves, the next two run out; with more, three must stay.
SPARE = (0, 2)
LEAVING = ((0, 40), (30, 60))  # steps after they joined


@dataclass(frozen=True)
class Pressure:
    """One point of `AXES`. runner: each step read at once ("direct"), the one before it ("ahead"),
    or that with captured steps. seed: draws lengths, joins, cancellations, page order.
    """

    model: str
    nodes: int | str
    drafter: str
    sampling: str
    dtype: str
    chunk: int
    runner: str
    options: str
    seed: int = 0

    def __str__(self) -> str:
        return " ".join(f"{axis}={value}" for axis, value in vars(self).items())


def pressure_cases(axes: Axes = AXES) -> list[Pressure]:
    """A case for every row of a covering array."""
    rows: list[Row] = covering_array(axes)
    return [Pressure(**row, seed=seed) for seed, row in enumerate(rows)]


class UnderPressure:
    """Runs cases on loaded models; plain answers are kept. eager: nothing is captured."""

    def __init__(self, models: Models, eager: bool = False) -> None:
        self.models = models
        self.eager = eager
        self._truths: dict[tuple[Any, ...], Truth] = {}

    def truths(self, case: Pressure) -> list[tuple[Job, Truth]]:
        """The requests, all as long as they may be, and plain decoding of them: five prompts, and
        three samples of a sixth. Two of the prompts have no options, but such company.
        """
        loaded = self.models.load(case.model, case.dtype)
        found = []
        for index in range(REQUESTS):
            which = min(index, len(PROMPTS) - 1)
            prompt = loaded.prompt(PROMPTS[which], 500 + which)
            job = Job(prompt, sampling_params(case.sampling, MOST_NEW, 500 + index))
            truth = self._truth(case, job, index, "none")
            if case.options != "none" and which % 3 != 1:
                params = with_options(case.options, job, truth, True, LEAST)
                job = replace(job, params=params)
                truth = self._truth(case, job, index, case.options)
            found.append((job, truth))
        return found

    def _truth(self, case: Pressure, job: Job, index: int, options: str) -> Truth:
        key = (case.model, case.dtype, case.sampling, index, options)
        if key not in self._truths:
            loaded = self.models.load(case.model, case.dtype)
            self._truths[key] = plain_truth(loaded, job.prompt, job.params, 500 + index)
        return self._truths[key]

    def check(self, case: Pressure) -> Report:
        """Run a case and compare, with fewer pages until somebody is preempted: when the leavers
        leave decides how many are too few.
        """
        for spare in range(SPARE[case.seed % 2], -1, -1):
            report = self._run(case, spare)
            if report.preemptions or report.violations:
                return report
        nobody = Violation(str(case), "all", 0, "nobody was preempted")
        return replace(report, violations=[nobody])

    def _run(self, case: Pressure, spare: int) -> Report:
        """One run, with `spare` pages besides those of the largest request."""
        loaded = self.models.load(case.model, case.dtype)
        wanted = self.truths(case)
        jobs = _jobs(case, [job for job, _ in wanted])
        truths = [truth for _, truth in wanted]
        engine = _engine(case, loaded, truths, jobs, self.eager, spare)
        scramble(engine, case.seed)
        runs = run_jobs(engine, jobs, check_every=1)
        assert engine.scheduler.allocator.available == engine.pool.layout.pages
        named = zip(range(REQUESTS), jobs, runs, truths, strict=True)
        violations = [
            first_difference(str(case), str(index), run, truth, whole=job.leave is None)
            for index, job, run, truth in named
        ]
        return Report(
            sum(len(run.tokens) for run in runs),
            [one for one in violations if one is not None],
            [pair for run in runs for trace in run.traces for pair in accepted_pairs(trace)],
            sum(run.request.stats.preemptions for run in runs),
        )


def _jobs(case: Pressure, whole: Sequence[Job]) -> list[Job]:
    """The requests with ends of their own, when they join, and when some leave."""
    draw = random.Random(f"pressure {case.seed}")
    leavers = draw.sample(range(REQUESTS), LEAVERS)
    first = len(PROMPTS) - 1
    return [
        replace(
            job,
            params=replace(job.params, max_tokens=draw.randint(MOST_NEW - 9, MOST_NEW)),
            join=5 if index >= first else draw.randint(0, 3),
            leave=draw.randint(*LEAVING[case.seed % 2]) if index in leavers else None,
            first=first if index > first else None,
        )
        for index, job in enumerate(whole)
    ]


def _engine(
    case: Pressure,
    loaded: Loaded,
    truths: Sequence[Truth],
    jobs: Sequence[Job],
    eager: bool,
    spare: int,
) -> Engine:
    """With pages for the largest request and `spare` more. A CPU pretends its captured steps."""
    chain = case.nodes == "chain"
    most = max(pages_for(len(job.prompt) + job.params.max_tokens) for job in jobs)
    captured = case.runner == "captured" and not eager
    config = EngineConfig(
        CHAIN if chain else int(case.nodes),
        chain,
        case.chunk,
        most + spare,
        PLACES,
        eager=not captured,
    )
    make = drafter_maker(case.drafter, loaded, [truth.tokens for truth in truths], case.seed)
    engine = make_engine(loaded, make, config, drafts=case.drafter == "dflash")
    if captured and loaded.target.device.type == "cpu":
        engine.runner = Pretend(engine, PLACES, eager=False)
        engine.runner.captures = engine.runner.keep_logits = True
    engine.lookahead = case.runner != "direct"
    return engine
