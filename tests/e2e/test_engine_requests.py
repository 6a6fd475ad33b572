"""Requests: where they end, seeds, capacity, joining and leaving, bad weights. Never a leak."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from checkpoint_tools import (
    CheckpointMaker,
    copy,
    edit,
    replace_tensors,
    stored_tensors,
    write_byte_tokenizer,
)

from e2e.helpers import finish, greedy, load, plain, prompt, replay, run, sampled
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.engine.request import RequestOutput, StreamEvent
from kdtree_engine.errors import CapacityError, OptionError

LONG = 60


@pytest.fixture
def folder(checkpoint: CheckpointMaker) -> Path:
    return checkpoint("k2.6", drafter=True)


@pytest.fixture(scope="session")
def with_text(checkpoint: CheckpointMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model over a vocabulary of bytes and special slots."""
    made = checkpoint("k2.6", seed=6, drafter=True, dims=Dims(vocab_size=512))
    folder = copy(made, tmp_path_factory.mktemp("text") / "model")
    write_byte_tokenizer(folder)
    return folder


# ------------------------------------------------------------------------------- where they end


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 9, 16, 59])
def test_max_tokens_cuts_exactly(tokens: int, folder: Path) -> None:
    """Though whole paths are accepted at once, not one token more or less leaves."""
    ids = prompt(70)
    answer = plain(folder, ids, greedy(LONG))
    out = run(load(folder, replay(folder, ids)), ids, greedy(tokens))
    assert out.token_ids == answer[:tokens]
    assert (out.finish_reason, out.stats.tokens, out.prompt_tokens) == ("length", tokens, 70)
    assert tokens < 9 or max(out.stats.accepted) > 2, "paths were accepted"


def test_the_first_stop_inside_an_accepted_path(folder: Path) -> None:
    """Pain point 16: text up to the first stop is kept, nothing after it leaves the engine."""
    ids = prompt(70)
    answer = plain(folder, ids, greedy(LONG))
    cut_inside, llm = 0, load(folder, replay(folder, ids))
    whole = run(llm, ids, greedy(LONG)).stats.accepted
    ends = set(itertools.accumulate((1 + accepted for accepted in whole), initial=1))
    for place in range(3, 40):
        if answer[place] in answer[:place]:
            continue
        out = run(llm, ids, greedy(LONG, stop_token_ids=(answer[place],)))
        assert out.token_ids == answer[: place + 1]
        assert (out.finish_reason, out.stats.tokens) == ("stop", place + 1)
        assert 1 + out.stats.steps + sum(out.stats.accepted) == place + 1
        cut_inside += place + 1 not in ends
    assert cut_inside > 2, "no stop lay inside a path"


def test_the_model_s_own_stop_ids(folder: Path, tmp_path: Path) -> None:
    """Those of config.json and of generation_config.json end a text; ignore_eos goes on, but not
    over stop_token_ids.
    """
    ids = prompt(70)
    answer = plain(folder, ids, greedy(LONG))
    new = [place for place in range(8, LONG) if answer[place] not in answer[:place]]
    places = new[0], new[10]
    first, later = answer[places[0]], answer[places[1]]
    model = copy(folder, tmp_path / "model")
    for name, key, token, end in (
        ("config.json", "eos_token_id", later, places[1] + 1),
        ("generation_config.json", "eos_token_id", [later, first], places[0] + 1),
    ):
        edit(model, {key: token}, name)
        if name == "config.json":
            edit(model, {"text_config.eos_token_id": token})
        out = run(load(model, "ngram"), ids, SamplingParams(max_tokens=LONG))
        assert (out.token_ids, out.finish_reason) == (answer[:end], "stop")
    out = run(load(model, "ngram"), ids, greedy(LONG))
    assert (out.token_ids, out.finish_reason) == (answer, "length")
    out = run(load(model, "ngram"), ids, greedy(LONG, stop_token_ids=[answer[5]]))
    assert (out.token_ids, out.finish_reason) == (answer[:6], "stop")


@pytest.mark.parametrize("drafter", ["none", "ngram", "random", "dflash", "replay"])
def test_the_model_s_positions_end_a_text(drafter: str, checkpoint: CheckpointMaker) -> None:
    """Up to the very last position, with trees that would reach beyond it."""
    folder = checkpoint("k2.6", drafter=True, dims=Dims(max_positions=128))
    ids = prompt(110)
    answer = plain(folder, ids, greedy(LONG))
    assert len(answer) == 18
    chosen = {"dflash": folder / "drafter", "replay": replay(folder, ids)}.get(drafter, drafter)
    out = run(load(folder, chosen, tree_nodes=31), ids, greedy(LONG))
    assert (out.token_ids, out.finish_reason) == (answer, "length")
    llm = load(folder)
    assert len(run(llm, prompt(127), greedy(LONG)).token_ids) == 1
    assert llm.logits(prompt(128)).shape == (128, 160)
    for refused in (lambda: llm.generate(prompt(128), greedy(1)), lambda: llm.logits(prompt(129))):
        with pytest.raises(CapacityError, match=r"12[89] tokens.*positions end at 128"):
            refused()


# ------------------------------------------------------------------------------------------ text


def test_streamed_text_is_the_final_text(with_text: Path) -> None:
    """Byte by byte, with incomplete characters held back; a stop token is no text."""
    llm = load(with_text, with_text / "drafter")
    assert llm.tokenizer is not None
    for params in (greedy(50), sampled(50, seed=1), sampled(50, seed=2), sampled(1)):
        events = list(llm.stream("def é", params))
        final = events[-1].output
        assert final is not None and all(event.output is None for event in events[:-1])
        assert "".join(event.text for event in events) == final.text
        assert [token for event in events for token in event.token_ids] == final.token_ids
        assert final.text == llm.tokenizer.decode(final.token_ids)
        assert final.token_ids == run(llm, llm.tokenizer.encode("def é"), params).token_ids
    stop = final.token_ids[0]
    *_, last = llm.stream("def é", sampled(80).__class__(80, 1.0, seed=5, stop_token_ids=(stop,)))
    assert last.output is not None and last.output.token_ids[-1] == stop
    assert last.output.text == llm.tokenizer.decode(last.output.token_ids[:-1])


def test_named_stop_tokens_of_the_vocabulary(with_text: Path) -> None:
    assert {257, 258} <= load(with_text).engine.stop_ids


def test_a_stream_left_early_gives_everything_back(folder: Path) -> None:
    llm = load(folder, "ngram")
    events = llm.stream(prompt(70), greedy(50))
    next(events), next(events)
    assert llm.engine.has_work
    events.close()
    llm.engine.check_integrity()
    assert not llm.engine.has_work
    assert run(llm, prompt(70), greedy(20)).token_ids == plain(folder, prompt(70), greedy(20))


def test_streams_and_calls_on_one_engine(with_text: Path) -> None:
    """Whoever steps the engine advances everyone; each reader still gets every event."""
    llm = load(with_text, "ngram")
    ids = [llm.tokenizer.encode(text) for text in ("one", "another", "third")]  # type: ignore[union-attr]
    want = [plain(with_text, one, greedy(20 + 9 * index)) for index, one in enumerate(ids)]
    stop = want[1][15]
    first = llm.stream(ids[0], greedy(20))
    second = llm.stream(ids[1], greedy(29, stop_token_ids=(stop,)))
    events: list[list[StreamEvent]] = [[next(first)], [next(second)]]
    logits = llm.logits(ids[2])
    assert torch.equal(logits, load(with_text).logits(ids[2]))
    events[0].append(next(first))
    assert run_outputs(llm.generate(ids[2], greedy(3))) == [want[2][:3]]
    assert len(llm.engine.scheduler.running) == 2, "only its own requests are waited for"
    assert run_outputs(llm.generate(ids[2], greedy(38))) == [want[2]]
    for mine, rest in zip(events, (first, second), strict=True):
        mine += rest
        final = mine[-1].output
        assert final is not None and all(event.output is None for event in mine[:-1])
        assert "".join(event.text for event in mine) == final.text
        assert [token for event in mine for token in event.token_ids] == final.token_ids
    assert events[0][-1].output.token_ids == want[0]  # type: ignore[union-attr]
    assert events[1][-1].output.token_ids == want[1][: want[1].index(stop) + 1]  # type: ignore[union-attr]
    llm.engine.check_integrity()


def run_outputs(outs: list[RequestOutput]) -> list[list[int]]:
    return [out.token_ids for out in outs]


# ----------------------------------------------------------------------------------------- seeds


def test_seeds(folder: Path) -> None:
    """None draws a seed and reports it; the same seed gives the same text, another one does not."""
    llm, ids = load(folder, "ngram"), prompt(20)
    drawn = [run(llm, ids, sampled(30, seed=None)) for _ in range(2)]
    assert drawn[0].seed != drawn[1].seed
    assert drawn[0].token_ids != drawn[1].token_ids
    for out in drawn:
        again = run(load(folder), ids, sampled(30, seed=out.seed))
        assert (again.token_ids, again.seed) == (out.token_ids, out.seed)
    assert run(llm, ids, sampled(3, seed=-(2**80))).seed == -(2**80)
    [one, other] = llm.generate([ids, ids], sampled(30, seed=None))
    assert one.token_ids != other.token_ids, "requests of one call draw seeds of their own"


# -------------------------------------------------------------------------- many at a time


def jobs(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Different lengths and settings."""
    return [
        (
            prompt(3 + 37 * index % 140, seed=index),
            sampled(9 + 5 * index, index) if index % 3 == 1 else greedy(8 + 7 * index % 30),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("drafter", ["none", "ngram", "dflash"])
def test_more_requests_than_places(drafter: str, folder: Path) -> None:
    work = jobs(7)
    chosen = folder / "drafter" if drafter == "dflash" else drafter
    llm = load(folder, chosen, max_requests=2, prefill_chunk=50)
    outs = llm.generate([ids for ids, _ in work], [params for _, params in work])
    llm.engine.check_integrity()
    assert [out.token_ids for out in outs] == [plain(folder, *job) for job in work]


def test_joining_and_leaving_while_others_run(folder: Path) -> None:
    """Requests come at any step and go at any step, cancelled ones in prefill and in decoding."""
    work = jobs(6)
    llm = load(folder, folder / "drafter", prefill_chunk=16, max_requests=3)
    engine = llm.engine
    requests = []
    for index, (ids, params) in enumerate(work):
        requests.append(engine.add(ids, params))
        for _ in range(2):
            engine.step()
            engine.check_integrity()
        if index in (2, 4):
            engine.cancel(requests[index])
            engine.check_integrity()
            engine.cancel(requests[index])  # twice does no harm
            engine.check_integrity()
    stayed = [index for index in range(6) if index not in (2, 4)]
    finish(llm, [requests[index] for index in stayed])
    for index in stayed:
        assert requests[index].output_ids == plain(folder, *work[index])
    assert not engine.has_work
    assert engine.scheduler.allocator.available == engine.pool.layout.pages


def test_requests_wait_for_pages(folder: Path) -> None:
    """Three pages, two for each request: one at a time, in order of arrival, none starves."""
    work = [(prompt(70 + index, seed=index), greedy(20)) for index in range(4)]
    llm = load(folder, "ngram", cache_pages=3, max_requests=4)
    requests = [llm.engine.add(*job) for job in work]
    done: list[int] = []
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
        assert len(llm.engine.scheduler.running) <= 1
        done += [one.id for one in requests if one.finish_reason and one.id not in done]
    assert done == sorted(done) and len(done) == 4
    assert [one.output_ids for one in requests] == [plain(folder, *job) for job in work]


def test_capacity_is_checked_before_anything_runs(folder: Path) -> None:
    llm = load(folder, cache_pages=2)
    with pytest.raises(CapacityError) as caught:
        llm.generate([prompt(5), prompt(100)], greedy(30))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("needs 3 cache pages", "100 tokens", "up to 30 new", "cache has 2"):
        assert part in message
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    # the last token is never cached
    assert len(run(llm, prompt(100), greedy(29)).token_ids) == 29


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompt is empty"),
        ([3, 160], r"token 160 is outside the vocabulary \(0..159\)"),
        ([-1], "token -1 is outside"),
    ],
)
def test_bad_prompts_leave_the_engine_as_it_was(bad: list[int], message: str, folder: Path) -> None:
    llm = load(folder)
    with pytest.raises(OptionError, match=message):
        llm.generate([prompt(5), bad], greedy(4))
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    assert run(llm, prompt(5), greedy(4)).token_ids == plain(folder, prompt(5), greedy(4))
    assert llm.generate([]) == []


# ----------------------------------------------------------------------------------- bad weights

POISON = 7


@pytest.fixture(params=[float("nan"), float("inf")], ids=["nan", "inf"])
def poisoned(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    """One token's embedding is broken, so only texts with that token are."""
    model = copy(folder, tmp_path / "model")
    name = "language_model.model.embed_tokens.weight"
    embedding = stored_tensors(model)[name].clone()
    embedding[POISON] = request.param
    replace_tensors(model, {name: embedding})
    return model


def clean_prompt(folder: Path, tokens: int) -> list[int]:
    """Text and greedy continuation without the broken token."""
    for seed in range(0, 200, 2):
        ids = [token for token in prompt(80, seed) if token != POISON]
        if POISON not in plain(folder, ids, greedy(tokens)):
            return ids
    raise AssertionError("no such prompt")


def test_broken_weights_fail_that_request_alone(folder: Path, poisoned: Path) -> None:
    """In prefill, beside a healthy request; the engine goes on, in the very same pages."""
    healthy = clean_prompt(folder, 20)
    truth = plain(folder, healthy, greedy(20))
    llm = load(poisoned, "random", cache_pages=6)
    for _ in range(3):
        bad, good = llm.generate([[5, POISON] + healthy, healthy], greedy(20))
        llm.engine.check_integrity()
        assert (bad.finish_reason, bad.token_ids) == ("error", [])
        assert bad.error is not None and "not finite" in bad.error and "\n" not in bad.error
        assert (good.finish_reason, good.error, good.token_ids) == ("length", None, truth)


def test_a_drafted_token_cannot_break_a_request(folder: Path, poisoned: Path) -> None:
    """The broken token is in every tree; unless it is accepted, nobody sees it."""
    healthy = clean_prompt(folder, 20)

    class Planter:
        def __init__(self, llm: LLM) -> None:
            self.inner = llm.engine.drafter

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def propose(self, states: list, candidates: int) -> list:
            blocks = self.inner.propose(states, candidates)  # type: ignore[attr-defined]
            for block in blocks:
                known = (block.tokens == POISON).any(1)
                block.tokens[~known, 1] = POISON
            return blocks

    llm = load(poisoned, "random")
    llm.engine.drafter = Planter(llm)  # type: ignore[assignment]
    assert run(llm, healthy, greedy(20)).token_ids == plain(folder, healthy, greedy(20))


def test_broken_weights_in_decoding(folder: Path, poisoned: Path) -> None:
    """What came before the broken token stays, then the request fails."""
    for seed in range(0, 200, 2):
        ids = [token for token in prompt(40, seed) if token != POISON]
        answer = plain(folder, ids, greedy(LONG))
        if POISON in answer[1:]:
            break
    else:
        raise AssertionError("no such prompt")
    place = answer.index(POISON)
    for drafter in ("none", replay(folder, ids)):
        out = run(load(poisoned, drafter), ids, greedy(LONG))
        assert out.finish_reason == "error" and out.error is not None
        assert out.token_ids == answer[: place + 1]  # whatever the tree had beyond it
        assert f"for position {len(ids) + place + 1}" in out.error


@pytest.mark.parametrize("call", ["generate", "logits"])
def test_a_broken_request_s_pages_are_not_shared(call: str, folder: Path, poisoned: Path) -> None:
    """A broken token in a chunk spoils the pages before it in that chunk; nobody may find them."""
    healthy = clean_prompt(folder, 20)
    llm = load(poisoned, "ngram", prefill_chunk=100)
    broken = [*healthy[:70], POISON, *healthy]
    if call == "generate":
        assert run(llm, broken, greedy(4)).finish_reason == "error"
    else:
        assert not bool(llm.logits(broken)[70:].isfinite().any())
    out = run(llm, healthy, greedy(20))
    assert (out.error, out.token_ids) == (None, plain(folder, healthy, greedy(20)))
    assert run(llm, healthy, greedy(20)).stats.cached_tokens == 64  # a healthy one's are found


def test_a_failed_admission_ends_its_own_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not stay at the head of the queue, where it would fail every step to come."""
    llm = load(folder)
    engine = llm.engine
    bad = engine.add(prompt(5), greedy(3))
    later = engine.add(prompt(6), greedy(3))
    with monkeypatch.context() as patch:
        patch.setattr(engine.state, "admit", lambda request: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.check_integrity()
    assert bad.finish_reason == "error"
    while engine.has_work:
        engine.step()
    assert later.output_ids == plain(folder, prompt(6), greedy(3))
