"""Random callers: they add, step, cancel, generate and stream, with good options and bad ones.

The cache is so small that requests preempt each other. After every action pages and places must be
accounted for; a bad request changes nothing; a good one ends with the tokens of plain decoding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tools import write_byte_tokenizer
from hard import examples
from hypothesis import given
from hypothesis import strategies as st

from e2e.helpers import load
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.engine.request import Request, RequestOutput, StreamEvent
from kdtree_engine.errors import CapacityError, KDTreeError, OptionError, TokenizerError

VOCAB, PAGES, POSITIONS = 512, 4, 512
DIMS = Dims(num_layers=2, num_experts=4, vocab_size=VOCAB, max_positions=POSITIONS)

OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.7, 1e30, 1e-45),
    "top_k": (None, 1, 5, 10**30),
    "top_p": (None, 0.5, 1e-300),
    "min_p": (0, 0.3, 1),
    "seed": (0, -1, 2**70),
    "stop_token_ids": ((), (3, 257)),
    "ignore_eos": (True, False),
    "stop": ((), "a", ["never to come", "\ud800"]),
    "min_tokens": (0, 9),
    "repetition_penalty": (1.0, 1.3),
    "frequency_penalty": (0, -2),
    "presence_penalty": (0, 2),
    "logit_bias": (None, {5: 100, 6: -100}),
    "allowed_token_ids": (None, range(40), [7]),
    "bad_words": ((), ["b", "\ud800"], [[1, 2], [3]]),
    "logprobs": (None, 0, 20),
    "prompt_logprobs": (None, 0, 3),
}
BAD_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("temperature", 1e39),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {VOCAB: 1}),
    ("allowed_token_ids", [VOCAB]),
    ("allowed_token_ids", [-1]),
    ("bad_words", [[2**70]]),
    ("bad_words", [[one] for one in range(VOCAB)]),
    ("bad_words", ["word"] * 2000 + ["w" * 4000]),
    ("max_tokens", 0),
    ("n", 129),
)
BAD_PROMPTS: tuple[Any, ...] = ([], [VOCAB], [-1], [2**70], [1] * POSITIONS, [1] * (64 * PAGES), "")
BAD_PROMPTS += ([None], [True], [0.5], b"ab", None, ["a", 1])

MAX_TOKENS = (1, 9, 60, 120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("hard-requests")
    make_checkpoint(home, "k2.6", dims=DIMS)
    write_byte_tokenizer(home)
    return home


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder, "ngram", cache_pages=PAGES, max_requests=3, prefill_chunk=40)


class Callers:
    """What they have under way, and what they may do next."""

    def __init__(self, llm: LLM, folder: Path, draw: random.Random) -> None:
        self.llm, self.folder, self.draw = llm, folder, draw
        self.added: list[Request] = []
        self.ended: list[tuple[list[int], SamplingParams, list[int]]] = []
        self.streams: list[tuple[Iterator[StreamEvent], list[int], SamplingParams, list[int]]] = []
        self.actions: tuple[Callable[[], None], ...] = (
            self.add, self.add, self.step, self.step, self.step, self.cancel, self.generate,
            self.open_stream, self.read_stream, self.read_stream, self.close_stream, self.refuse,
            self.refuse_settings,
        )  # fmt: skip

    def settings(self) -> SamplingParams:
        names = self.draw.sample(sorted(OPTIONS), self.draw.choice((0, 1, 2, 5)))
        chosen = {name: self.draw.choice(OPTIONS[name]) for name in names}
        most = self.draw.choice(MAX_TOKENS)
        if chosen.get("min_tokens", 0) > most:
            most = 60
        return SamplingParams(**{"seed": 3, **chosen, "max_tokens": most})

    def prompt(self) -> list[int]:
        length = self.draw.choice((1, 20, 63, 64, 65, 130))
        return [self.draw.randrange(50) for _ in range(length)]

    def add(self) -> None:
        if len(self.added) < 5:
            self.added.append(self.llm.engine.add(self.prompt(), self.settings()))

    def step(self) -> None:
        self.llm._step()  # the engine's own would keep from streams what happened to them
        self.settle()

    def settle(self) -> None:
        for request in [one for one in self.added if one.finish_reason is not None]:
            self.added.remove(request)
            self.note(request.tokens[: request.prompt_tokens], request.params, request.output_ids)
            assert request.error is None or "no token could be chosen" in request.error

    def cancel(self) -> None:
        if self.added:
            self.llm.engine.cancel(self.added.pop(self.draw.randrange(len(self.added))))

    def generate(self) -> None:
        prompts, settings = [self.prompt(), self.prompt()], [self.settings(), self.settings()]
        outs: list[RequestOutput] = self.llm.generate(prompts, settings)
        for ids, params, out in zip(prompts, settings, outs, strict=True):
            self.note(ids, params, out.token_ids)
        self.settle()

    def open_stream(self) -> None:
        if len(self.streams) < 3:
            ids, params = self.prompt(), self.settings()
            self.streams.append((self.llm.stream(ids, params), ids, params, []))

    def read_stream(self) -> None:
        if not self.streams:
            return
        stream, ids, params, told = self.streams[0]
        event = next(stream, None)
        if event is not None:
            told += event.token_ids
            assert event.output is None or event.output.token_ids == told
            return
        self.streams.pop(0)
        self.note(ids, params, told)
        self.settle()

    def close_stream(self) -> None:
        if self.streams:
            stream, *_ = self.streams.pop()
            stream.close()  # type: ignore[attr-defined]

    def note(self, ids: list[int], params: SamplingParams, tokens: list[int]) -> None:
        self.ended.append((ids, params, tokens))

    def standing(self) -> tuple[Any, ...]:
        scheduler = self.llm.engine.scheduler
        waiting = [one.id for one in scheduler.waiting]
        running = [(one.id, one.context, list(one.pages)) for one in scheduler.running]
        return waiting, running, scheduler.allocator.available, dict(self.llm._inboxes)

    def refuse(self) -> None:
        prompt, before = self.draw.choice(BAD_PROMPTS), self.standing()
        with pytest.raises((OptionError, CapacityError, TokenizerError)):
            self.llm.generate([[1, 2], prompt], SamplingParams(max_tokens=2))
        assert self.standing() == before

    def refuse_settings(self) -> None:
        name, value = self.draw.choice(BAD_OPTIONS)
        before = self.standing()
        with pytest.raises(KDTreeError) as caught:
            bad = SamplingParams(**{name: value})
            self.llm.generate([[1, 2], [3]], [SamplingParams(max_tokens=2), bad])
        assert isinstance(caught.value, OptionError | CapacityError | TokenizerError)
        assert self.standing() == before

    def finish(self) -> None:
        for stream, *_ in self.streams:
            stream.close()  # type: ignore[attr-defined]
        while self.added:
            self.step()

    def check_some(self) -> None:
        """Against plain decoding, one request at a time with room for all of it."""
        for ids, params, tokens in self.draw.sample(self.ended, min(3, len(self.ended))):
            [truth] = load(self.folder, tree_nodes=0, cache_pages=8).generate(ids, params)
            assert tokens == truth.token_ids, (ids, params)


@examples(12)
@given(st.integers(0, 2**32))
def test_random_callers(llm: LLM, folder: Path, seed: int) -> None:
    callers = Callers(llm, folder, random.Random(seed))
    for _ in range(40):
        callers.draw.choice(callers.actions)()
        llm.engine.check_integrity()
    callers.finish()
    llm.engine.check_integrity()
    assert not llm.engine.has_work and not llm._inboxes
    callers.check_some()


def test_they_preempt_each_other(llm: LLM) -> None:
    """The cache above is small enough for what the test is to see."""
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    outs = llm.generate([[one] * 20 for one in (1, 2, 3)], params)
    assert sum(out.stats.preemptions for out in outs) > 0
