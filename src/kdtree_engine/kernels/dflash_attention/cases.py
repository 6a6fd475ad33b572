"""Draft blocks: heads, KV heads, head width, block and context lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """B blocks of L rows over S context tokens."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    context: int


CASES = (
    Case("packaged", 1, 4, 2, 64, 8, 300),
    Case("batch", 3, 4, 2, 16, 8, 65),
    Case("no-context", 2, 2, 1, 16, 2, 0),
)
