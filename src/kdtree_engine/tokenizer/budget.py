"""What the rendering of a template may use: rounds, text, the size of values, time."""

from __future__ import annotations

import time
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

from kdtree_engine.errors import TokenizerError

MAX_ROUNDS = 500_000  # of loops and macros
MAX_TEXT = 8_000_000  # characters of one text, items of one list
MAX_EMITTED = 32_000_000  # characters in all, captured ones too
MAX_MADE = 2_000_000_000  # characters and items of all that is made, shown or not
MAX_SEARCH = 500_000_000  # steps of one method of a text
MAX_WEIGHT = 500_000  # values inside one container, each as often as it is reached
MAX_SECONDS = 10.0
MAX_BITS = 128  # of whole numbers in arithmetic


class Budget:
    """What one rendering may still use. Raises TokenizerError where it is used up."""

    def __init__(self) -> None:
        self.rounds = MAX_ROUNDS
        self.emitted = MAX_EMITTED
        self.made = MAX_MADE
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, rounds: int, emitted: int, made: int) -> None:
        self.rounds -= rounds
        self.emitted -= emitted
        self.made -= made
        if self.rounds < 0:
            raise TokenizerError(f"the chat template runs more than {MAX_ROUNDS} rounds of loops")
        if self.emitted < 0:
            raise TokenizerError(f"the chat template writes over {MAX_EMITTED} characters")
        if self.made < 0:
            raise TokenizerError(f"the chat template makes over {MAX_MADE} characters in all")
        if time.monotonic() > self.deadline:
            raise TokenizerError(f"the chat template runs longer than {MAX_SECONDS:g} s")


_budget: ContextVar[Budget] = ContextVar("budget")


def spend(rounds: int = 1, emitted: int = 0, made: int = 0) -> None:
    """Charge the rendering that is going on, if any (filters also run when none is)."""
    budget = _budget.get(None)
    if budget is not None:
        budget.spend(rounds, emitted, made)


def fits(size: int) -> None:
    """Raises TokenizerError if a text or list of this size must not be made."""
    if size > MAX_TEXT:
        raise TokenizerError(f"the chat template makes a text or list of over {MAX_TEXT} items")
    spend(made=size)


def sized(value: Any) -> Any:
    """The same value, if what can be reached in it is bounded. Raises TokenizerError."""
    weight_of(value)
    return value


def weight_of(value: Any) -> int:
    """How many values can be reached in one, each as often as it is reached; long texts count more.

    Raises TokenizerError where they are over MAX_WEIGHT.
    """
    spend()
    weight, stack = 0, [value]
    while stack:
        item = stack.pop()
        weight += 1
        if isinstance(item, str):  # first, since most are
            weight += len(item) // 16
        elif isinstance(item, dict | Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            stack += item
        elif isinstance(item, Namespace):  # could hold itself, or one thing many times over
            raise TokenizerError("the chat template prints a namespace: not supported")
        if weight + len(stack) > MAX_WEIGHT:
            raise TokenizerError("the chat template builds values too large")
    return weight


def text_of(value: Any) -> str:
    """A value as the template prints it, if that is bounded."""
    return value if isinstance(value, str) else str(sized(value))


class rendering:
    """`with rendering():` what runs inside has a budget of its own."""

    def __enter__(self) -> None:
        self._token = _budget.set(Budget())

    def __exit__(self, *error: object) -> None:
        _budget.reset(self._token)
