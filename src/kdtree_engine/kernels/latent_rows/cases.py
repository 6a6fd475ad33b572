"""Attention inputs: widths of the query, the latent and the rotated key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`query` is normed (q_lora) unless `plain`; the sum comes in `parts` parts."""

    name: str
    rows: int
    query: int
    latent: int
    rope: int
    parts: int
    plain: bool = False


CASES = (
    Case("packaged", 16, 96, 64, 32, 1),
    Case("no-query-norm", 3, 48, 32, 16, 2, plain=True),
    Case("k2.6", 4, 1536, 512, 64, 5),
)
