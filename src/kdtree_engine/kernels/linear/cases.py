"""Weight shapes of the dense products, [out, in] as checkpoints store them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One weight."""

    name: str
    columns: int
    depth: int


CASES = (
    Case("packaged-qkv-a", 192, 256),
    Case("packaged-q-b", 256, 96),
    Case("packaged-output", 256, 256),
    Case("packaged-dense-down", 256, 768),
    Case("packaged-head", 3072, 256),
    Case("router", 16, 256),
    Case("odd", 131, 67),
    Case("one-column", 1, 5),
    Case("k2.6-down-slice", 64, 2048),
)
