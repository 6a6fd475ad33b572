"""Moves of accepted rows: sources and destinations inside one small cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Slots to move; `overlap` where a destination is also a source."""

    name: str
    source: tuple[int, ...]
    destination: tuple[int, ...]


CASES = (
    Case("nothing", (), ()),
    Case("root-only", (128,), (5,)),
    Case("page-border", (128, 130, 133), (62, 63, 64)),
    Case("overlap", (10, 11, 15), (11, 12, 13)),
)
