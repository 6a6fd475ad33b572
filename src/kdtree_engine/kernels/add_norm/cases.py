"""Residual additions of the network: widths and how many parts the sum comes in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`rows` rows of `width` elements, the addend in `parts` parts."""

    name: str
    rows: int
    width: int
    parts: int


CASES = (
    Case("packaged", 16, 256, 1),
    Case("odd", 3, 33, 2),
    Case("k2.6", 5, 7168, 2),
)
