"""Two steps under way at once, as on a GPU: the host learns late, and nothing may show it.

The engine's loop is the same on both devices; here it looks ahead on the CPU, where every bit of it
can be watched. tests/gpu/test_graphs.py does the same with captured steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_tools import CheckpointMaker

from e2e.helpers import finish, greedy, load, plain, prompt, run, sampled
from e2e.pretend import Pretend
from kdtree_engine import LLM
from kdtree_engine.drafter.base import DraftStates
from kdtree_engine.engine import graphs
from kdtree_engine.errors import CapacityError
from kdtree_engine.types import DraftBlocks


@pytest.fixture
def folder(checkpoint: CheckpointMaker) -> Path:
    return checkpoint("k2.6", drafter=True)


class Oracle:
    """A device drafter that knows the text: nearly all of its drafts are accepted."""

    name, trained, on_device, horizon, tap_layers = "oracle", False, True, 7, ()

    def __init__(self, text: list[int]) -> None:
        self.text = torch.tensor(text + [0] * 8)

    def propose(self, states: DraftStates, candidates: int) -> DraftBlocks:
        places = states.contexts[:, None].long() + torch.arange(1, 8)
        tokens = self.text[places.clamp(max=len(self.text) - 1)][:, :, None].repeat(1, 1, 2)
        tokens[:, :, 1] = (tokens[:, :, 0] + 1) % 160
        return DraftBlocks(tokens, torch.tensor([-0.1, -3.0]).expand(tokens.shape).contiguous())

    def reset(self, request: int) -> None:
        pass


def ahead(folder: Path, drafter: object, **options: object) -> LLM:
    llm = load(folder, drafter, **options)
    llm.engine.lookahead = True
    return llm


@pytest.mark.parametrize("drafter", ["none", "ngram", "dflash"])
@pytest.mark.parametrize("nodes", [0, 7, "chain:3"])
def test_texts_are_plain_decoding_s(drafter: str, nodes: int | str, folder: Path) -> None:
    """More requests than places, prompts in pieces, ends at every length, greedy and sampled."""
    work = [
        (
            prompt(3 + 37 * index % 140, index),
            (sampled if index % 3 == 1 else greedy)(1 + 3 * index),
        )
        for index in range(7)
    ]
    chosen = folder / "drafter" if drafter == "dflash" else drafter
    llm = ahead(folder, chosen, tree_nodes=nodes, max_requests=3, prefill_chunk=50)
    outs = llm.generate([ids for ids, _ in work], [params for _, params in work])
    llm.engine.check_integrity()
    assert [out.token_ids for out in outs] == [plain(folder, *job) for job in work]
    assert all(
        out.stats.tokens == params.max_tokens for out, (_, params) in zip(outs, work, strict=True)
    )


@pytest.mark.parametrize("drafter", ["none", "ngram", "dflash"])
@pytest.mark.parametrize("nodes", [5, "chain:4"])
def test_steps_are_filled_up_with_the_dummy_place(
    drafter: str, nodes: int | str, folder: Path
) -> None:
    """Buckets of 1, 2, 4 and 5 places and of 1 and nodes + 1 rows, each captured when first needed,
    while other requests decode.
    """
    work = [
        (
            prompt(3 + 37 * index % 140, index),
            (sampled if index % 3 == 1 else greedy)(2 + 3 * index),
        )
        for index in range(8)
    ]
    chosen = folder / "drafter" if drafter == "dflash" else drafter
    llm = load(folder, chosen, tree_nodes=nodes, max_requests=5, prefill_chunk=50)
    engine = llm.engine
    engine.runner = Pretend(engine, 5, eager=False)
    engine.runner.captures = True
    outs = llm.generate([ids for ids, _ in work], [params for _, params in work])
    engine.check_integrity()
    assert [out.token_ids for out in outs] == [plain(folder, *job) for job in work]
    captured = engine.runner._graphs
    assert {places for places, *_ in captured} == {1, 2, 4, 5}
    most = int(str(nodes).removeprefix("chain:")) + 1
    assert {rows for _, rows, *_ in captured} <= {1, most}
    fresh = load(folder, chosen, tree_nodes=nodes).generate(*work[-1])
    assert outs[-1].stats.accepted == fresh[0].stats.accepted, "the very same drafts"


def test_one_step_is_under_way_while_another_is_read(folder: Path) -> None:
    engine = ahead(folder, folder / "drafter").engine
    request = engine.add(prompt(20), greedy(30))
    assert len(engine.step()) == 1, "the prompt"
    assert engine.step() == [] and engine.runner.in_flight == 1
    while request.finish_reason is None:
        assert len(engine.step()) == 1
        assert engine.runner.in_flight <= 1
    assert engine.step() == [] and engine.runner.in_flight == 0
    host = ahead(folder, "ngram").engine
    host.add(prompt(20), greedy(30))
    for _ in range(5):
        assert len(host.step()) == 1, "a drafter on the host needs the text first"


def test_a_stop_inside_a_path_drops_the_step_after_it(folder: Path) -> None:
    """The device has gone on from beyond the stop; its pages and its place go to others at once."""
    ids, others = prompt(61), [prompt(62 + index, 2 * index + 3) for index in range(3)]
    answer = plain(folder, ids, greedy(60))
    llm = ahead(folder, Oracle([*ids, *answer]), max_requests=2, cache_pages=4)
    for place in range(3, 40, 4):
        if answer[place] in answer[:place]:
            continue
        first = llm.engine.add(ids, greedy(60, stop_token_ids=(answer[place],)))
        rest = [llm.engine.add(one, greedy(25)) for one in others]
        finish(llm, [first, *rest])
        assert first.output_ids == answer[: place + 1]
        assert [one.output_ids for one in rest] == [
            plain(folder, one, greedy(25)) for one in others
        ]
        assert first.context == len(ids) + place
    assert max(first.stats.accepted) > 3


def test_cancelled_while_a_step_is_under_way(folder: Path) -> None:
    """Its place is taken before that step is read."""
    llm = ahead(folder, folder / "drafter", max_requests=1)
    ids = prompt(100)
    for steps in range(2, 7):
        leaving = llm.engine.add(ids, greedy(50))
        for _ in range(steps):
            llm.engine.step()
        llm.engine.cancel(leaving)
        before = list(leaving.tokens)
        assert run(llm, ids[: 90 + steps], greedy(20)).token_ids == plain(
            folder, ids[: 90 + steps], greedy(20)
        )
        assert leaving.tokens == before


def test_the_cache_of_a_dropped_step_is_found_by_nobody(folder: Path) -> None:
    """What a follow-up finds in the prefix cache was emitted, though the device wrote on."""
    ids = prompt(50)
    answer = plain(folder, ids, greedy(60))
    stop = next(p for p in range(16, 50) if answer[p] not in answer[:p])
    llm = ahead(folder, Oracle([*ids, *answer]))
    out = run(llm, ids, greedy(60, stop_token_ids=(answer[stop],)))
    follow = [*ids, *out.token_ids, *prompt(40, 7)]
    later = run(llm, follow, greedy(20))
    assert later.stats.cached_tokens == (len(ids) + len(out.token_ids) - 1) // 64 * 64 > 0
    assert later.token_ids == plain(folder, follow, greedy(20))


@pytest.mark.parametrize("lookahead", [False, True])
def test_an_interrupted_step_ends_what_was_running(
    folder: Path, lookahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is lost: another caller's stream ends with an error, not with a gap, and the
    engine serves the next request.
    """
    ids = prompt(70)
    llm = load(folder, folder / "drafter", max_requests=2)
    llm.engine.lookahead = lookahead
    stream = llm.stream(ids, greedy(40))
    got = [token for _ in range(3) for token in next(stream).token_ids]
    with monkeypatch.context() as patch:

        def interrupted(*given: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(graphs, "unpack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt(20, 3), greedy(5))
    events = list(stream)
    got += [token for event in events for token in event.token_ids]
    output = events[-1].output
    assert output is not None and output.finish_reason == "error"
    assert "interrupted" in str(output.error)
    assert output.token_ids == got == plain(folder, ids, greedy(40))[: len(got)]
    assert llm.engine.runner.in_flight == 0 and not llm.engine.has_work
    llm.engine.check_integrity()
    assert run(llm, ids, greedy(40)).token_ids == plain(folder, ids, greedy(40))


@pytest.mark.parametrize("drafter", ["none", "ngram", "dflash"])
def test_graphs_are_captured_before_the_first_token(
    drafter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream does not stop for a capture, or meet a progress bar, between two of its words."""
    chosen = folder / "drafter" if drafter == "dflash" else drafter
    engine = ahead(folder, chosen, tree_nodes=7).engine
    engine.runner = Pretend(engine, 5, eager=False)
    engine.runner.captures = True
    captured: list[object] = []
    original = Pretend._capture

    def counted(self: Pretend, key: object, like: DraftBlocks | None) -> object:
        captured.append(key)
        return original(self, key, like)

    monkeypatch.setattr(Pretend, "_capture", counted)
    request = engine.add(prompt(70, 3), greedy(24))
    while not request.output_ids:
        engine.step()
    before = list(captured)
    assert before
    while request.finish_reason is None:
        engine.step()
    assert captured == before and len(request.output_ids) == 24


def test_a_step_without_memory_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(folder, folder / "drafter")
    with monkeypatch.context() as patch:

        def full(*given: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

        patch.setattr(graphs, "unpack", full)
        with pytest.raises(CapacityError, match=r"ran out of memory.*2\.00 GiB.*cache_pages$"):
            llm.generate(prompt(20), greedy(5))
    assert not llm.engine.has_work
    assert run(llm, prompt(20), greedy(5)).token_ids == plain(folder, prompt(20), greedy(5))
