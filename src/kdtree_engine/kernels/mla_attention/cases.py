"""Attention shapes: heads, latent widths, context and rows, straddling tiles and blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One request: `context` committed keys, `rows` of a run or of a tree."""

    name: str
    heads: int
    value_dim: int
    rope_dim: int
    context: int
    rows: int


CASES = (
    Case("first-token", 4, 64, 32, 0, 1),
    Case("packaged-tree", 4, 64, 32, 300, 16),
    Case("tile-border", 4, 64, 32, 63, 8),
    Case("block-border", 4, 64, 32, 510, 32),
    Case("one-head", 1, 16, 8, 130, 5),
    Case("k2.6-slice", 8, 512, 64, 1000, 64),
)
