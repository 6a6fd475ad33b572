"""A full cache: requests preempt each other and resume, leave at any step, break off inside a line.
Every text stays plain decoding's, nothing leaks, and somebody always goes on.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from checkpoint_tools import CheckpointMaker

from e2e.helpers import greedy, load, plain, sampled
from e2e.helpers import prompt as any_prompt
from e2e.models import TINY, Models
from e2e.pressure import QUICK_AXES, UnderPressure, pressure_cases
from e2e.pretend import Pretend
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.cache import pages_for
from kdtree_engine.engine import loop
from kdtree_engine.engine.loop import Engine
from kdtree_engine.engine.request import Request, StepResult

Work = list[tuple[list[int], SamplingParams]]
ENGINES = (  # drafter, runner
    ("none", "direct"),
    ("ngram", "direct"),
    ("dflash", "ahead"),
    ("dflash", "captured"),
    ("ngram", "captured"),
)
INTERRUPTED = ("scheduler.py", "pages.py", "loop.py", "request.py", "prefill.py", "state.py")


@pytest.fixture
def folder(checkpoint: CheckpointMaker) -> Path:
    return checkpoint("k2.6", drafter=True, dims=TINY)


def prompt(length: int, seed: int = 0) -> list[int]:
    return any_prompt(length, seed, TINY.vocab_size)


def tight(folder: Path, drafter: str = "none", runner: str = "direct", **options: Any) -> LLM:
    """An engine with six pages for four requests at once."""
    chosen = folder / "drafter" if drafter == "dflash" else drafter
    given = {"cache_pages": 6, "max_requests": 4, "tree_nodes": 5, "prefill_chunk": 40, **options}
    llm = load(folder, chosen, **given)
    if runner == "captured":
        llm.engine.runner = Pretend(llm.engine, given["max_requests"], eager=False)
        llm.engine.runner.captures = True
    llm.engine.lookahead = runner != "direct"
    return llm


def work(count: int = 6, most: int = 120) -> Work:
    """Prompts of about a page that grow over the next border or two."""
    return [
        (
            prompt((20, 40, 70, 33, 12, 63)[index % 6], index),
            (sampled if index % 2 else greedy)(most - 7 * (index % 5)),
        )
        for index in range(count)
    ]


def step(engine: Engine, got: dict[int, list[int]]) -> list[StepResult]:
    """One step, its tokens noted by request, everything accounted for after it."""
    results = engine.step()
    engine.check_integrity()
    for result in results:
        got.setdefault(result.request.id, []).extend(result.tokens)
    return results


def run_out(engine: Engine, got: dict[int, list[int]]) -> None:
    steps = 0
    while engine.has_work:
        step(engine, got)
        steps += 1
        assert steps < 3000, "no end in sight"
    assert engine.scheduler.allocator.available == engine.pool.layout.pages
    assert engine.step() == [] and engine.runner.in_flight == 0


# ---------------------------------------------------------------------------------- preemption


@pytest.mark.parametrize(("drafter", "runner"), ENGINES)
def test_a_full_cache_preempts_and_resumes(drafter: str, runner: str, folder: Path) -> None:
    engine = tight(folder, drafter, runner).engine
    requests = [engine.add(*job) for job in work()]
    got: dict[int, list[int]] = {}
    oldest: list[Request] = []
    while engine.has_work:
        before = [one.stats.preemptions for one in engine.scheduler.running]
        oldest = list(engine.scheduler.running[:1])
        step(engine, got)
        if oldest:
            assert oldest[0].stats.preemptions == before[0], "the oldest was preempted"
    for request, job in zip(requests, work(), strict=True):
        assert request.output_ids == got[request.id] == plain(folder, *job)
        assert request.finish_reason == "length" and request.stats.tokens == job[1].max_tokens
        assert request.stats.to_dict()["preemptions"] == request.stats.preemptions
    assert sum(one.stats.preemptions for one in requests) > 0


def test_many_more_run_than_their_limits_would_allow(folder: Path) -> None:
    """Admission asks for the prompt and the first steps alone."""
    llm = load(folder, cache_pages=8, max_requests=4)
    requests = [llm.engine.add(prompt(20, seed), greedy(400)) for seed in range(4)]
    llm.engine.step()
    assert [len(one.pages) for one in requests] == [1, 1, 1, 1]
    assert pages_for(420) * 4 > 8
    for _ in range(60):
        llm.engine.step()
    assert len(llm.engine.scheduler.running) == 4
    assert {len(one.pages) for one in requests} == {2}


def test_two_that_each_want_the_whole_cache(folder: Path) -> None:
    """They take turns in one order, and both come to their end."""
    engine = tight(folder, cache_pages=4, max_requests=2).engine
    jobs: Work = [(prompt(60 + seed, seed), greedy(4 * 64 - 60 - seed)) for seed in range(2)]
    requests = [engine.add(*job) for job in jobs]
    run_out(engine, {})
    assert [one.output_ids for one in requests] == [plain(folder, *job) for job in jobs]
    assert requests[0].stats.preemptions == 0 < requests[1].stats.preemptions < 8


def test_a_resumed_request_finds_its_own_pages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning of its text is what is kept longest."""
    computed: list[tuple[int, int, int]] = []
    original = loop.prefill

    def watched(parts: Any, request: Request, count: int) -> StepResult:
        computed.append((request.id, request.context, count))
        return original(parts, request, count)

    monkeypatch.setattr(loop, "prefill", watched)
    engine = tight(folder, cache_pages=7, max_requests=2, prefill_chunk=512, tree_nodes=0).engine
    jobs: Work = [(prompt(60, 2), greedy(140)), (prompt(190, 4), greedy(100))]
    requests = [engine.add(*job) for job in jobs]
    run_out(engine, {})
    assert [one.output_ids for one in requests] == [plain(folder, *job) for job in jobs]
    assert requests[1].stats.preemptions == 1 and requests[1].stats.cached_tokens == 0
    again = [(first, count) for one, first, count in computed if one == requests[1].id][1:]
    assert len(again) == 1 and again[0][0] == 3 * 64, "its first pages were still there"
    assert 0 < again[0][1] <= 64 + 64


@pytest.mark.parametrize("kept", [False, True], ids=["prompt", "logits"])
def test_preempted_inside_its_prompt(kept: bool, folder: Path) -> None:
    """It begins its prompt again; logits that are kept are those of an undisturbed prefill."""
    engine = tight(folder, cache_pages=7, prefill_chunk=30).engine
    first = engine.add(prompt(62, 2), greedy(30))
    ids = prompt(120, 4)
    late = engine.add(ids, greedy(20), keep_logits=kept)
    engine.step()
    engine.step()
    assert 0 < late.context < 120 and not late.output_ids and engine.scheduler.running[-1] is late
    engine.scheduler.preempt()
    engine.check_integrity()
    run_out(engine, {})
    assert late.stats.preemptions == 1
    assert first.output_ids == plain(folder, prompt(62, 2), greedy(30))
    if kept:
        assert torch.equal(torch.cat(late.logits), load(folder).logits(ids))
    else:
        assert late.output_ids == plain(folder, ids, greedy(20))


# -------------------------------------------------------------------------------- leaving early


@pytest.mark.parametrize(("drafter", "runner"), ENGINES)
def test_cancelled_at_any_step(drafter: str, runner: str, folder: Path) -> None:
    """By chance; every text is plain decoding's, as far as it came."""
    for seed in range(2):
        draw = random.Random(f"cancel {seed} {drafter} {runner}")
        llm = tight(folder, drafter, runner)
        engine, got, jobs = llm.engine, dict[int, list[int]](), work(8)
        requests = [engine.add(*job) for job in jobs]
        when = {draw.randrange(60): request for request in requests if draw.random() < 0.6}
        gone: set[int] = set()
        for count in range(60):
            step(engine, got)
            if count in when:
                gone.add(when[count].id)
                for _ in range(2):  # twice does no harm
                    engine.cancel(when[count])
                    engine.check_integrity()
        run_out(engine, got)
        for request, job in zip(requests, jobs, strict=True):
            answer = plain(folder, *job)
            if request.id not in gone:
                assert request.output_ids == answer
            assert (
                request.output_ids
                == got.get(request.id, [])
                == answer[: len(got.get(request.id, []))]
            )


@pytest.mark.parametrize(
    ("state", "runner"),
    [
        *((state, "direct") for state in ("waiting", "prefill", "decoding")),
        *((state, "direct") for state in ("preempted", "finished")),
        *((state, "ahead") for state in ("prefill", "in flight", "preempted", "finished")),
        ("in flight", "captured"),
        ("preempted", "captured"),
    ],
)
def test_cancelled_in_every_state(state: str, runner: str, folder: Path) -> None:
    """Nobody else notices; a preempted one holds nothing and waited before all others."""
    engine = tight(folder, "dflash", runner).engine
    requests, got = [engine.add(*job) for job in work()], dict[int, list[int]]()
    found: list[Request] = []
    for _ in range(500):  # every state comes within some tens of steps
        if found:
            break
        step(engine, got)
        found = [one for one in requests if _state(engine, one) == state]
    assert found, f"no request was ever {state}"
    leaving = found[-1]
    if state == "preempted":
        assert engine.scheduler.waiting[0] is found[0] and leaving.output_ids
    had = list(leaving.tokens)
    engine.cancel(leaving)
    run_out(engine, got)
    assert leaving.tokens == had
    for request, job in zip(requests, work(), strict=True):
        if request is not leaving:
            assert request.output_ids == got[request.id] == plain(folder, *job)


def _state(engine: Engine, request: Request) -> str:
    if request.finish_reason is not None:
        return "finished"
    if request.place < 0:
        return "preempted" if request.stats.preemptions else "waiting"
    if request.is_prefill:
        return "prefill"
    return "in flight" if engine.runner.flights_of(request) else "decoding"


def test_streams_closed_under_pressure(folder: Path) -> None:
    """A reader that leaves, others that stay, some with requests that are preempted meanwhile."""
    llm = tight(folder, "dflash", "ahead")
    preempted: list[Request] = []
    original = llm.engine.scheduler.preempt

    def preempt() -> None:
        preempted.append(llm.engine.scheduler.running[-1])
        original()

    llm.engine.scheduler.preempt = preempt  # type: ignore[method-assign]
    jobs = work()
    streams = [llm.stream(*job) for job in jobs]
    texts: list[list[int]] = [[] for _ in jobs]
    for turn in range(30):
        for index, stream in enumerate(streams):
            if index == 1 and turn == 7:
                stream.close()  # type: ignore[attr-defined]
            event = next(stream, None)
            if event is not None:
                texts[index] += event.token_ids
        llm.engine.check_integrity()
    for index, stream in enumerate(streams):
        for event in stream:
            texts[index] += event.token_ids
        llm.engine.check_integrity()
        answer = plain(folder, *jobs[index])
        assert texts[index] == (answer if index != 1 else answer[: len(texts[index])])
    assert not llm.engine.has_work and not llm._inboxes
    assert preempted


class Interrupter:
    """Raises KeyboardInterrupt before the n-th line that runs in the engine's host code."""

    def __init__(self, lines: int) -> None:
        self.left = lines
        self.where = ""

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        path = Path(frame.f_code.co_filename)
        if path.name not in INTERRUPTED or "kdtree_engine" not in path.parts:
            return None
        # Engine.step's own lines are the guard: before it nothing has changed.
        if event == "line" and frame.f_code.co_name != "step":
            self.left -= 1
            if self.left < 0:
                self.where = f"{path.name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.trace

    def step(self, engine: Engine) -> list[StepResult] | None:
        """A step, None if it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return engine.step()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)


@pytest.mark.parametrize("runner", ["direct", "ahead"])
def test_interrupted_between_any_two_lines(runner: str, folder: Path) -> None:
    """What ran ends with an error and what it had emitted; what waits goes on, preempted ones too;
    pages and places are all there.
    """
    jobs, draw, places, ends = work(7), random.Random(runner), set(), 0
    for _ in range(15):
        engine = tight(folder, "dflash", runner).engine
        requests, got = [engine.add(*job) for job in jobs], dict[int, list[int]]()
        interrupter = Interrupter(draw.randrange(6000))
        while engine.has_work:
            results = interrupter.step(engine)
            engine.check_integrity()
            if results is None:
                places.add(interrupter.where)
                assert not engine.scheduler.running and engine.runner.in_flight == 0
                assert engine.scheduler.allocator.available == engine.pool.layout.pages
                break
            for result in results:
                got.setdefault(result.request.id, []).extend(result.tokens)
        run_out(engine, got)
        for request, job in zip(requests, jobs, strict=True):
            answer = plain(folder, *job)
            assert request.output_ids == answer[: len(request.output_ids)]
            if request.finish_reason == "error":
                ends += 1
            else:
                assert request.output_ids == answer
    assert len(places) > 7 and ends > 7


# --------------------------------------------------------------------------------- the contract


@pytest.fixture(scope="module")
def under_pressure(tmp_path_factory: pytest.TempPathFactory) -> UnderPressure:
    return UnderPressure(Models(tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize("model", QUICK_AXES["model"])
def test_contract_holds_under_pressure(under_pressure: UnderPressure, model: str) -> None:
    """`make exact` has the packaged model and larger trees as well."""
    reports = [
        under_pressure.check(case) for case in pressure_cases(QUICK_AXES) if case.model == model
    ]
    violations = [str(one) for report in reports for one in report.violations]
    assert not violations, "\n".join(violations)
    assert len(reports) > 5 and all(report.preemptions for report in reports)


def test_a_wrong_resumption_is_reported(
    under_pressure: UnderPressure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that computes one token too few anew: the root's place in the cache is off."""
    case = next(
        one for one in pressure_cases(QUICK_AXES) if one.model == "groups" and one.nodes == 7
    )
    assert not under_pressure.check(case).violations
    original = Request.rewind

    def short(self: Request) -> None:
        original(self)
        if self.output_ids:
            self.tokens[-2] = (self.tokens[-2] + 1) % 100

    monkeypatch.setattr(Request, "rewind", short)
    assert under_pressure.check(case).violations
