"""Several threads on one LLM: each gets what it would get alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kdtree_engine import LLM, SamplingParams

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
    failures: list[str] = []

    def compare(index: int, ids: list[int], error: str | None) -> None:
        if error is not None or ids != alone[index].token_ids:
            failures.append(f"{index}: {error} {ids}")

    def generate(index: int) -> None:
        out = llm.generate(PROMPTS[index], SETTINGS[index])[0]
        compare(index, out.token_ids, out.error)

    def stream(index: int) -> None:
        ids: list[int] = []
        for event in llm.stream(PROMPTS[index], SETTINGS[index]):
            ids += event.token_ids
        compare(index, ids, None)

    def score(index: int) -> None:
        ids = alone[index].token_ids[:9]
        if llm.logits(ids).shape != (9, llm.engine.target.config.vocab_size):
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
