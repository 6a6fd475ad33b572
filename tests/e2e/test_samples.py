"""n outputs of one prompt: its computation is shared, each output is its own request's."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_tools import CheckpointMaker, copy, replace_tensors, stored_tensors

from e2e.helpers import finish, greedy, load, plain
from e2e.helpers import prompt as any_prompt
from e2e.models import TINY
from kdtree_engine import SamplingParams
from kdtree_engine.errors import CapacityError, OptionError


def prompt(length: int, seed: int = 0) -> list[int]:
    return any_prompt(length, seed, TINY.vocab_size)


def hot(tokens: int, **options: object) -> SamplingParams:
    return greedy(tokens, temperature=1.0, **options)


@pytest.fixture
def folder(checkpoint: CheckpointMaker) -> Path:
    return checkpoint("k2.6", drafter=True, dims=TINY)


@pytest.mark.parametrize("drafter", ["none", "dflash"])
def test_each_sample_can_be_repeated_alone(drafter: str, folder: Path) -> None:
    chosen = folder / "drafter" if drafter == "dflash" else drafter
    llm = load(folder, chosen, tree_nodes=5, max_requests=3)
    prompts = [prompt(130, 2), prompt(9, 4)]
    settings = [hot(12, seed=7, n=5), hot(10, seed=2**64 - 2, n=3)]
    outs = llm.generate(prompts, settings)
    llm.engine.check_integrity()
    assert [out.sample for out in outs] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert [out.seed for out in outs] == [7, 8, 9, 10, 11, 2**64 - 2, 2**64 - 1, 0]
    for index, out in enumerate(outs):
        ids, one = (prompts[0], settings[0]) if index < 5 else (prompts[1], settings[1])
        assert out.token_ids == plain(folder, ids, hot(one.max_tokens, seed=out.seed))
    assert len({tuple(out.token_ids) for out in outs}) == 8
    assert [out.stats.cached_tokens for out in outs] == [0, 128, 128, 128, 128, 0, 0, 0]


def test_the_prompt_is_computed_once(folder: Path) -> None:
    """The others wait for it, though places and pages are free; requests behind them do not."""
    engine = load(folder, prefill_chunk=40, max_requests=8).engine
    first = engine.add(prompt(130, 2), hot(12, seed=1))
    others = [engine.add(prompt(130, 2), hot(12, seed=1 + i), after=first) for i in range(1, 4)]
    behind = engine.add(prompt(5), greedy(3))
    for _ in range(3):
        engine.step()
        assert engine.scheduler.running == [first, behind][: len(engine.scheduler.running)]
        assert behind.output_ids
    while first.is_prefill:
        engine.step()
    engine.step()
    assert set(others) <= set(engine.scheduler.running)
    assert [one.stats.cached_tokens for one in others] == [128] * 3


def test_drawn_and_greedy_seeds(folder: Path) -> None:
    llm = load(folder)
    outs = llm.generate(prompt(20), hot(12, n=3))
    assert [(out.seed - outs[0].seed) % 2**64 for out in outs] == [0, 1, 2]
    assert outs[1].token_ids == plain(folder, prompt(20), hot(12, seed=outs[1].seed))
    same = llm.generate(prompt(20), greedy(8, n=3))
    assert [out.token_ids for out in same] == [plain(folder, prompt(20), greedy(8))] * 3
    assert len(llm.generate(prompt(70), greedy(1, n=128))) == 128


@pytest.mark.parametrize("when", ["waiting", "prefill", "decoding"])
def test_the_first_leaves(when: str, folder: Path) -> None:
    llm = load(folder, prefill_chunk=40, max_requests=3)
    ids = prompt(130, 2)
    first = llm.engine.add(ids, hot(12, seed=1))
    others = [llm.engine.add(ids, hot(12, seed=1 + i), after=first) for i in range(1, 4)]
    for _ in range({"waiting": 0, "prefill": 2, "decoding": 6}[when]):
        llm.engine.step()
    llm.engine.cancel(first)
    finish(llm, others)
    for seed, one in enumerate(others, 2):
        assert one.output_ids == plain(folder, ids, hot(12, seed=seed))


def test_a_broken_prompt_fails_every_sample(folder: Path, tmp_path: Path) -> None:
    model = copy(folder, tmp_path / "model")
    name = "language_model.model.embed_tokens.weight"
    embedding = stored_tensors(model)[name].clone()
    embedding[7] = float("nan")
    replace_tensors(model, {name: embedding})
    llm = load(model)
    outs = llm.generate([3, 7, 5], hot(4, seed=1, n=3))
    assert [out.finish_reason for out in outs] == ["error"] * 3
    assert all("not finite" in str(out.error) for out in outs)
    llm.engine.check_integrity()


def test_all_or_none_are_queued(folder: Path) -> None:
    llm = load(folder, cache_pages=2)
    with pytest.raises(CapacityError):
        llm.generate([prompt(5), prompt(100)], greedy(40, n=3))
    assert not llm.engine.has_work


@pytest.mark.parametrize("bad", [0, -1, 129, 1.5, None, True, "2"])
def test_refused(bad: object) -> None:
    with pytest.raises(OptionError, match=r"^n "):
        SamplingParams(n=bad)  # type: ignore[arg-type]


def test_a_stream_has_one_output(folder: Path) -> None:
    llm = load(folder)
    with pytest.raises(OptionError, match=r"n 2: a stream has one output; generate\(\)"):
        next(llm.stream(prompt(5), greedy(4, n=2)))
    assert not llm.engine.has_work
