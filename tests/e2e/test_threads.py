"""Several threads on one LLM: each gets what it would get alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.engine.request import RequestOutput, StepResult
from kdtree_engine.errors import CapacityError

PROMPTS = ("def add(a, b):", "class Point:", "for i in range(", "import os")
SETTINGS = (
    SamplingParams(20, ignore_eos=True),
    SamplingParams(20, temperature=1.0, seed=1, ignore_eos=True),
    SamplingParams(20, temperature=0.7, seed=5, stop="zzz", ignore_eos=True),
    SamplingParams(20, logprobs=2, ignore_eos=True),
)


def test_threads_take_turns() -> None:
    llm = LLM(device="cpu", cache_pages=24, max_requests=3)
    alone = [llm.generate(*pair)[0] for pair in zip(PROMPTS, SETTINGS, strict=True)]
    logits = llm.logits(alone[0].token_ids)
    failures: list[str] = []

    def compare(index: int, out: RequestOutput) -> None:
        expected = alone[index]
        same = (out.text, out.token_ids, out.log_probs) == (
            expected.text, expected.token_ids, expected.log_probs,
        )  # fmt: skip
        if out.error is not None or not same:
            failures.append(f"{index}: {out.error} {out.token_ids}")

    def generate(index: int) -> None:
        compare(index, llm.generate(PROMPTS[index], SETTINGS[index])[0])

    def stream(index: int) -> None:
        *_, last = llm.stream(PROMPTS[index], SETTINGS[index])
        assert last.output is not None
        compare(index, last.output)

    def score(index: int) -> None:
        if not torch.equal(llm.logits(alone[index].token_ids), logits):
            failures.append(f"{index}: logits")

    def repeat(index: int, work: Callable[[int], None]) -> None:
        try:
            for _ in range(4):
                work(index)
        except Exception as error:  # noqa: BLE001 - a thread's own would be lost
            failures.append(f"{index}: {error!r}")

    works = [(i, work) for i in range(4) for work in (generate, stream)] + [(0, score)]
    threads = [threading.Thread(target=repeat, args=one) for one in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:3]
    llm.engine.check_integrity()
    assert not llm.engine.has_work


def test_logits_that_another_threads_step_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of them, and no wait for ever."""
    llm = LLM(device="cpu", cache_pages=24, max_requests=3, prefill_chunk=4)
    step = llm.engine.step

    def interrupted() -> list[StepResult]:
        results = step()
        llm.engine._abandon(results)  # as where an interrupt ends a step
        return []

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(CapacityError, match="the logits were not computed: the step"):
        llm.logits(list(range(40, 60)))
    monkeypatch.undo()
    assert llm.logits(list(range(40, 60))).shape[0] == 20
    llm.engine.check_integrity()
