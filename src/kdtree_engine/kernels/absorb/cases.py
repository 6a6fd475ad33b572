"""Absorbed queries: heads and widths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`heads` of `nope` + `rope` each against latents of `latent`; the sum in `parts` parts."""

    name: str
    rows: int
    heads: int
    nope: int
    rope: int
    latent: int
    parts: int


CASES = (
    Case("packaged", 16, 4, 32, 32, 64, 1),
    Case("odd", 3, 2, 24, 8, 40, 2),
    Case("k2.6-rank", 9, 8, 128, 64, 512, 3),
)
