"""Expert layers: experts, hidden and intermediate width, experts a token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One layer of experts."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int


CASES = (
    Case("packaged", 16, 256, 64, 4),
    Case("tiny", 8, 64, 32, 2),
    Case("single", 3, 32, 16, 1),
    Case("wide", 4, 640, 48, 2),
)
