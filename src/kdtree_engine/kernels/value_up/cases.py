"""Values from latents: heads and widths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`heads` of `value` columns each from latents of `latent`."""

    name: str
    rows: int
    heads: int
    latent: int
    value: int


CASES = (
    Case("packaged", 16, 4, 64, 32),
    Case("odd", 3, 2, 40, 24),
    Case("k2.6-rank", 9, 8, 512, 128),
)
