"""What the engine tests share: prompts, plain decoding as the truth, ways to run an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.drafter.replay import ReplayDrafter
from kdtree_engine.engine.request import Request, RequestOutput

VOCAB = 160


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Random token ids; a second half that repeats the first gives n-grams something to find."""
    draw = random.Random(f"{seed} {length}")
    ids = [draw.randrange(vocab) for _ in range(length)]
    half = length // 2
    return ids[: length - half] + ids[:half] if seed % 2 else ids


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, **{"ignore_eos": True, **options})


def sampled(tokens: int, seed: int | None = 5) -> SamplingParams:
    return greedy(tokens, temperature=1.0, top_p=0.9, seed=seed)


def load(folder: Path, drafter: Any = "none", **options: Any) -> LLM:
    return LLM(folder, drafter=drafter, device="cpu", **options)


def plain(folder: Path, ids: Sequence[int], params: SamplingParams) -> list[int]:
    """The truth: one token at a time, one request at a time, no drafter."""
    return list(_plain(folder, tuple(ids), params))


@lru_cache(maxsize=8)
def _plain_engine(folder: Path) -> LLM:
    return load(folder, tree_nodes=0)


@lru_cache(maxsize=1000)
def _plain(folder: Path, ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    [out] = _plain_engine(folder).generate(ids, params)
    assert out.error is None
    return tuple(out.token_ids)


def replay(folder: Path, ids: Sequence[int], tokens: int = 60, ranks: int = 2) -> ReplayDrafter:
    """A drafter that knows the greedy continuation, so that most drafts are accepted."""
    answer = [*ids, *plain(folder, ids, greedy(tokens))]
    return ReplayDrafter([answer], VOCAB, ranks=ranks)


def run(llm: LLM, ids: Sequence[int], params: SamplingParams) -> RequestOutput:
    [out] = llm.generate(list(ids), params)
    llm.engine.check_integrity()
    assert not llm.engine.has_work
    return out


def run_traced(
    llm: LLM, ids: Sequence[int], params: SamplingParams
) -> tuple[RequestOutput, list[tuple[list[int], list[int]]]]:
    """The output, and of every decode step the draft tree's tokens and parents."""
    events = list(llm.stream(list(ids), params))
    llm.engine.check_integrity()
    assert events[-1].output is not None
    trees = [event.step.tree for event in events if event.step is not None]
    return events[-1].output, [(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees]


def finish(llm: LLM, requests: Sequence[Request]) -> None:
    """Step until these have finished, checking after every step that nothing leaks."""
    while any(request.finish_reason is None for request in requests):
        llm.engine.step()
        llm.engine.check_integrity()
