"""Shapes of the batched products that the network makes: B, K, N and how w lies in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One product: w is [batch, depth, columns], stored transposed where `transposed`."""

    name: str
    batch: int
    depth: int
    columns: int
    transposed: bool = False


CASES = (
    Case("packaged-projection", 2, 256, 128),
    Case("packaged-experts-up", 16, 256, 128),
    Case("packaged-experts-down", 16, 64, 256),
    Case("packaged-scores", 5, 96, 64, transposed=True),
    Case("packaged-values", 5, 64, 64),
    Case("packaged-absorb", 4, 32, 64),
    Case("packaged-dense-down", 2, 768, 128),
    Case("one-batch", 1, 96, 64),
    Case("odd", 3, 33, 7),
    Case("long", 2, 1792, 24),
)
