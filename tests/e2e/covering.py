"""Covering arrays: few rows in which every pair of values of any two axes occurs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]
Pair = tuple[str, Any, str, Any]
Allowed = Callable[[Row], bool]
"""Whether a row, perhaps with some axes still open, may be completed and run."""


def anything(row: Row) -> bool:
    """No combination is left out."""
    return True


def all_pairs(axes: Axes, allowed: Allowed = anything) -> list[Pair]:
    """Every pair of values of two axes that a row may hold."""
    return [
        (a, x, b, y)
        for a, b in combinations(axes, 2)
        for x in axes[a]
        for y in axes[b]
        if allowed({a: x, b: y})
    ]


def pairs_of(row: Row, axes: Axes) -> list[Pair]:
    """The pairs that one row covers."""
    return [(a, row[a], b, row[b]) for a, b in combinations(axes, 2) if a in row and b in row]


def covering_array(axes: Axes, allowed: Allowed = anything) -> list[Row]:
    """Rows that cover `all_pairs`, greedily; the same axes always give the same rows.

    Each row starts from the first pair still uncovered; every further axis takes the allowed value
    that covers most, the least used one among equals. `allowed` may forbid combinations of several
    values, as long as no partial row leaves an axis without an allowed value.
    """
    open_pairs = dict.fromkeys(all_pairs(axes, allowed))
    used = {(axis, value): 0 for axis in axes for value in axes[axis]}
    rows: list[Row] = []
    while open_pairs:
        a, x, b, y = next(iter(open_pairs))
        row = {a: x, b: y}
        for axis in axes:
            if axis not in row:
                row[axis] = _best(row, axis, axes, allowed, open_pairs, used)
        rows.append({axis: row[axis] for axis in axes})
        for pair in pairs_of(rows[-1], axes):
            open_pairs.pop(pair, None)
        for item in rows[-1].items():
            used[item] += 1
    return rows


def _best(
    row: Row,
    axis: str,
    axes: Axes,
    allowed: Allowed,
    open_pairs: Mapping[Pair, None],
    used: Mapping[tuple[str, Any], int],
) -> Any:
    candidates = [value for value in axes[axis] if allowed({**row, axis: value})]
    assert candidates, f"no value of {axis} is allowed beside {row}"

    def worth(value: Any) -> tuple[int, int]:
        fresh = [pair for pair in pairs_of({**row, axis: value}, axes) if pair in open_pairs]
        return len(fresh), -used[axis, value]

    return max(candidates, key=worth)
