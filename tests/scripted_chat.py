"""A model for `kdtree chat` that says what a script tells it to.

    python tests/scripted_chat.py [options of kdtree chat]

runs the command over one that never stops talking, for tests of its signals.
"""

from __future__ import annotations

import copy
import itertools
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from kdtree_engine import cli
from kdtree_engine.cli.chat import ChatOptions
from kdtree_engine.engine.chat import ChatDelta, PartialAnswer
from kdtree_engine.engine.request import RequestOutput, RequestStats
from kdtree_engine.errors import KDTreeError
from kdtree_engine.tokenizer.parse import ChatEvent, ContentDelta

Answer = Iterable[list[ChatEvent]] | KDTreeError


class ScriptedLLM:
    """Gives its answers in order, a list of events a step; keeps what it was asked."""

    notes = ("skipped 23 vision tensors",)

    def __init__(self, *answers: Answer, finish_reason: str = "stop") -> None:
        self._answers = iter(answers)
        self.finish_reason = finish_reason
        self.asked: list[list[dict[str, Any]]] = []
        self.options: dict[str, Any] = {}
        self.params: Any = None

    def chat_stream(self, messages: Any, params: Any, **options: Any) -> Iterator[ChatDelta]:
        self.asked.append(copy.deepcopy(messages))
        self.params, self.options = params, options
        answer = next(self._answers)
        if isinstance(answer, KDTreeError):
            raise answer
        return self._steps(answer)

    def _steps(self, answer: Iterable[list[ChatEvent]]) -> Iterator[ChatDelta]:
        whole, steps = PartialAnswer(), 0
        for events in answer:
            whole.add(events)
            steps += 1
            yield ChatDelta(events, [1, 2])
        error = "the model broke" if self.finish_reason == "error" else None
        stats = RequestStats(steps, 2 * steps, [1] * steps, [3] * steps)
        output = RequestOutput("", [1, 2] * steps, self.finish_reason, 11, stats, 5, error)
        yield ChatDelta([], [], message=whole.message(output))


def install(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> ScriptedLLM:
    """Have the command open this model."""
    monkeypatch.setattr(ChatOptions, "open_engine", lambda self, model: llm)
    return llm


def endless() -> Iterator[list[ChatEvent]]:
    for number in itertools.count():
        time.sleep(0.01)
        yield [ContentDelta(f"word{number} ")]


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"
    with pytest.MonkeyPatch.context() as patch:
        install(ScriptedLLM(endless(), [[ContentDelta("second answer")]], endless()), patch)
        return cli.run(["chat", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
