"""Widths of the gated activations, gate and up together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Rows of `width` = 2 I elements."""

    name: str
    width: int


CASES = (Case("packaged-expert", 128), Case("packaged-dense", 1536), Case("odd", 66))
