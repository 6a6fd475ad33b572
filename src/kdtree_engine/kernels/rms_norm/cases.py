"""Widths of the norms in the network."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Rows of `width` elements."""

    name: str
    width: int


CASES = (
    Case("packaged-hidden", 256),
    Case("packaged-latent", 64),
    Case("odd", 33),
    Case("k2.6", 7168),
)
