"""Sizes of the candidate choice: depths, vocabulary, candidates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """K of V at each of H depths."""

    name: str
    depths: int
    vocabulary: int
    k: int


CASES = (Case("packaged", 7, 3072, 15), Case("all", 3, 40, 63), Case("one", 1, 160, 1))
