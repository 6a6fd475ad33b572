"""Draws the draft tree of a step: what was proposed, and the path that the target agreed with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from kdtree_engine.engine.request import StepTrace

# Marks carry what the colours say, for pipes and for terminals without them.
ACCEPTED, REJECTED, BONUS = "●", "○", "→"
ACCEPTED_STYLE, REJECTED_STYLE, BONUS_STYLE = "bold green", "dim", "bold cyan"
GUIDE_WIDTH, LINE_WIDTH = 4, 40  # columns of indentation per level, and left for the text


class TreePrinter:
    """Prints one tree a step, numbered."""

    def __init__(self, token_text: Callable[[int], str], stream: TextIO) -> None:
        self._token_text = token_text
        self._console = Console(file=stream, highlight=False)
        self._width = self._console.width
        self._steps = 0

    def show(self, trace: StepTrace) -> None:
        """Draw the next step."""
        self._steps += 1
        accepted = len(trace.path.indices) - 1
        title = f"step {self._steps}: {trace.tree.nodes} drafted, {accepted} accepted"
        self._console.print(Text(title, style="bold"))
        # rich drops branches that have no room; a terminal wraps them instead.
        needed = GUIDE_WIDTH * int(trace.tree.depths.max()) + LINE_WIDTH
        self._console.width = max(self._width, needed)
        self._console.print(draw(trace, self._token_text))


def draw(trace: StepTrace, token_text: Callable[[int], str]) -> Tree:
    """The tree with its root first and its nodes in the order they were proposed.

    Nodes without a fork between them share a line, or a chain would run off the screen. The number
    after a line is the drafter's probability of the path down to there.
    """
    tokens = [trace.root, *trace.tree.tokens.tolist()[1:]]
    scores = trace.tree.scores.tolist()
    path = set(trace.path.indices)
    children = _children(trace.tree.parents.tolist())

    def plant(first: int) -> tuple[Tree, int]:
        """A branch that starts at row `first`, and the last row on its line."""
        rows = _line(first, children, path)
        words = [visible(token_text(tokens[row])) for row in rows]
        mark, style = (ACCEPTED, ACCEPTED_STYLE) if first in path else (REJECTED, REJECTED_STYLE)
        text = Text(f"{mark} {' '.join(words)}", style=style, no_wrap=True, overflow="ellipsis")
        if rows[-1] > 0:
            text.append(f"  {math.exp(scores[rows[-1]]):.0%}", style="dim not bold")
        return Tree(text, guide_style="dim"), rows[-1]

    top, end = plant(0)
    waiting = [(top, end)]
    while waiting:
        branch, end = waiting.pop()
        if end == trace.path.indices[-1]:
            bonus = visible(token_text(trace.path.next_token))
            branch.add(Text(f"{BONUS} {bonus}", style=BONUS_STYLE))
        for child in children[end]:
            twig, twig_end = plant(child)
            branch.children.append(twig)
            waiting.append((twig, twig_end))
    return top


def _children(parents: list[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(row)
    return children


def _line(row: int, children: list[list[int]], path: set[int]) -> list[int]:
    """The rows that share a line with `row`: only children, as accepted or rejected as it is."""
    rows = [row]
    while len(children[row]) == 1 and (children[row][0] in path) == (row in path):
        (row,) = children[row]
        rows.append(row)
    return rows


def visible(text: str) -> str:
    """Token text with blanks that can be seen and nothing that moves the cursor."""
    return repr(text)[1:-1].replace(" ", "·")
