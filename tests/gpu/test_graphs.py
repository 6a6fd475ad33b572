"""Captured steps on CUDA: a graph does what its operators do one by one, to the bit, and decoding
by trees is plain decoding, whoever joins, leaves or is filled up with the dummy place.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from e2e.contract import MOST_NEW, Case, Contract
from e2e.drive import Job, MakeDrafter, Run, make_engine, pages_of, run_jobs, scramble
from e2e.models import Loaded, Models

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.config import EngineConfig
from kdtree_engine.drafter.dflash import DFlashDrafter
from kdtree_engine.drafter.ngram import NgramDrafter
from kdtree_engine.drafter.none import NoDrafter
from kdtree_engine.engine import graphs
from kdtree_engine.engine.loop import Engine

pytestmark = pytest.mark.gpu

NEW = 24
DRAFTERS = ("none", "ngram", "dflash")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), torch.device("cuda"))


@pytest.fixture(scope="module")
def loaded(models: Models) -> Loaded:
    return models.load("packaged", "bfloat16")


def maker(loaded: Loaded, drafter: str) -> MakeDrafter:
    makers: dict[str, MakeDrafter] = {
        "none": lambda pool: NoDrafter(),
        "ngram": lambda pool: NgramDrafter(),
        "dflash": lambda pool: DFlashDrafter(loaded.network, loaded.target, pool),
    }
    return makers[drafter]


def jobs_of(loaded: Loaded, count: int = 5) -> list[Job]:
    """Greedy and sampled, of several lengths, joining while others decode."""
    jobs = []
    for index in range(count):
        params = SamplingParams(
            NEW - 5 * (index % 3),
            temperature=float(index % 2),
            top_p=0.9,
            seed=index,
            ignore_eos=True,
        )
        jobs.append(Job(loaded.prompt(30 + 49 * index, 2 * index), params, 3 * index))
    return jobs


def engine_of(
    loaded: Loaded, drafter: str, jobs: Sequence[Job], nodes: int = 15, **options: object
) -> Engine:
    config = EngineConfig(nodes, cache_pages=pages_of(jobs), max_requests=3, prefill_chunk=64)
    config = replace(config, **options)  # type: ignore[arg-type]
    return make_engine(loaded, maker(loaded, drafter), config, drafts=drafter == "dflash")


def require_equal(one: Sequence[Run], other: Sequence[Run], trees: bool = False) -> None:
    """Tokens, the logits that chose them, and where asked the draft trees: the drafter's bits may
    follow the number of requests in the step, since they decide nothing.
    """
    for left, right in zip(one, other, strict=True):
        assert left.tokens == right.tokens
        assert torch.equal(torch.stack(left.logits), torch.stack(right.logits))
        if not trees:
            continue
        assert len(left.traces) == len(right.traces)
        for a, b in zip(left.traces, right.traces, strict=True):
            assert torch.equal(a.tree.tokens, b.tree.tokens)
            assert torch.equal(a.tree.parents, b.tree.parents)
            assert torch.equal(a.tree.scores, b.tree.scores)
            assert a.path == b.path


@pytest.mark.parametrize("places", [3, 5], ids=["full", "with dummies"])
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_graph_equals_eager_equals_plain(
    drafter: str, chain: bool, places: int, loaded: Loaded
) -> None:
    """Buckets of 1, 2, 3 places are full; of 1, 2, 4, 5 the third is not."""
    jobs = jobs_of(loaded)
    runs = []
    for eager in (False, True):
        engine = engine_of(loaded, drafter, jobs, chain=chain, eager=eager, max_requests=places)
        scramble(engine, 3)
        runs.append(run_jobs(engine, jobs))
        assert engine.runner.captures is not eager
    require_equal(*runs, trees=places == 3)
    plain = run_jobs(engine_of(loaded, "none", jobs, 0, eager=True, max_requests=1), jobs)
    require_equal(runs[0], plain)
    if drafter == "dflash":  # how far its paths reach follows the prompts, this project's source
        assert sum(count >= 2 for run in runs[0] for count in run.request.stats.accepted) >= 3


def test_a_dead_engine_spoils_no_capture(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps become garbage while another one is recorded."""
    jobs = jobs_of(loaded, 1)
    dead = engine_of(loaded, "dflash", jobs)
    expected = run_jobs(dead, jobs)
    step, waiting, seen = graphs.decode_step, [dead], []
    del dead

    def recorded(*args: object) -> object:
        if waiting and torch.cuda.is_current_stream_capturing():
            seen.append(weakref.ref(waiting.pop()))  # an engine and its runner know each other
            if gc.isenabled():  # then it could run at any moment: let it be this one
                gc.collect()
            assert seen[0]() is not None
        return step(*args)

    monkeypatch.setattr(graphs, "decode_step", recorded)
    runs = run_jobs(engine_of(loaded, "dflash", jobs), jobs)
    assert seen
    require_equal(runs, expected)


def test_a_lookahead_changes_nothing(loaded: Loaded) -> None:
    jobs = jobs_of(loaded)
    runs = []
    for lookahead in (True, False):
        engine = engine_of(loaded, "dflash", jobs)
        engine.lookahead = lookahead
        runs.append(run_jobs(engine, jobs))
    require_equal(*runs)


_CASE = Case("packaged", 15, "dflash", "p95", "bfloat16", 3, 64, "mixed", "miss", "scrambled")


@pytest.mark.parametrize(
    "case",
    [
        _CASE,
        replace(_CASE, nodes=63, prefix="decoded", lengths="tiles"),
        replace(_CASE, nodes="chain", sampling="greedy", prefix="prompt", lengths="block"),
        replace(_CASE, nodes=7, drafter="replay", model="flat", dtype="float32"),
        replace(_CASE, nodes=63, drafter="replay", model="groups", requests=4),
        replace(_CASE, nodes=2, drafter="random", requests=2, chunk=7, lengths="page"),
        replace(_CASE, nodes=0, model="flat", requests=4, sampling="p90"),
        replace(_CASE, options="penalties"),
        replace(_CASE, options="forbidden", nodes=63, drafter="replay", model="groups", requests=4),
        replace(_CASE, options="log_probs", nodes=15, drafter="replay", model="flat", requests=4),
        replace(_CASE, options="forbidden", sampling="greedy", nodes="chain", prefix="decoded"),
        replace(_CASE, options="log_probs", sampling="greedy", nodes=63, requests=2, chunk=512),
        replace(_CASE, options="stops", nodes=63, drafter="replay", model="groups", requests=4),
        replace(_CASE, options="penalties", drafter="ngram", sampling="greedy", lengths="short"),
    ],
    ids=str,
)
def test_the_contract(case: Case, models: Models) -> None:
    """The same cases as on the CPU (tests/e2e/contract.py), with captured steps."""
    report = Contract(models).check(case)
    assert not report.violations, "\n".join(map(str, report.violations))
    assert report.tokens >= case.requests * (MOST_NEW // 3)  # each asks for so many at least
    if case.drafter == "replay":
        assert report.accepted


def test_a_capture_in_mid_run_disturbs_nobody(loaded: Loaded) -> None:
    """Buckets for two and three requests are captured, and warmed up, while the first decodes: its
    cache, its state and its place are as they would have been.
    """
    jobs = jobs_of(loaded, 3)
    alone = run_jobs(engine_of(loaded, "dflash", jobs[:1]), jobs[:1])
    engine = engine_of(loaded, "dflash", jobs)
    together = run_jobs(engine, jobs)
    assert len(engine.runner._graphs) > 1
    require_equal(alone, together[:1])


def test_stop_tokens_and_ends(loaded: Loaded) -> None:
    """Stops inside paths, while the step behind them is under way; the pages go to others."""
    prompt = loaded.prompt(70, 2)
    llm = LLM(device="cuda", dtype="bfloat16", max_requests=2, cache_pages=6)
    [whole] = llm.generate(prompt, SamplingParams(60, ignore_eos=True))
    answer = whole.token_ids
    assert len(answer) == 60 and max(whole.stats.accepted) > 2
    for place in range(2, 40, 3):
        stop = (answer[place],)
        outs = llm.generate(
            [prompt, loaded.prompt(40, 4)],
            SamplingParams(60, stop_token_ids=stop, ignore_eos=True),
        )
        assert outs[0].token_ids == answer[: answer.index(answer[place]) + 1]
        assert outs[0].finish_reason == "stop"
        llm.engine.check_integrity()
    for most in range(1, 12):
        [out] = llm.generate(prompt, SamplingParams(most, ignore_eos=True))
        assert out.token_ids == answer[:most] and out.finish_reason == "length"


def test_memory_does_not_grow(loaded: Loaded) -> None:
    jobs = jobs_of(loaded)
    engine = engine_of(loaded, "dflash", jobs)
    engine.runner.keep_logits = False
    taken = []
    for _ in range(4):
        for job in jobs:
            engine.add(job.prompt, job.params)
        while engine.has_work or engine.runner.in_flight:
            engine.step()
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated())
    assert taken[-1] == taken[1], f"{taken} bytes after each round"
