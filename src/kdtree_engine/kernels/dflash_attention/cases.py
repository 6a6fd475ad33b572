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


@dataclass(frozen=True)
class PagedCase:
    """Blocks of L rows over paged contexts of the given lengths, under a window or two."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    contexts: tuple[int, ...]
    window: int | None = None
    sliding: int | None = None
    causal: bool = False


PAGED_CASES = (
    PagedCase("packaged", 4, 2, 64, 8, (300,)),
    PagedCase("borders", 4, 2, 16, 8, (63, 64, 65, 0, 1)),
    PagedCase("window", 4, 1, 32, 5, (200, 64, 10), window=70),
    PagedCase("sliding", 6, 2, 24, 8, (200, 128, 3), sliding=66, causal=True),
    PagedCase("narrow", 2, 2, 16, 8, (150, 7), window=20, sliding=4, causal=True),
    PagedCase("many-rows", 20, 1, 16, 7, (130,)),
    PagedCase("one-row", 2, 1, 16, 1, (65, 0)),
    PagedCase("causal", 4, 2, 16, 8, (65, 0, 130), causal=True),
    PagedCase("both-ways", 4, 1, 16, 8, (140, 3, 64), sliding=4),
    PagedCase("wide-both-ways", 2, 2, 24, 8, (200, 9), sliding=66),
    PagedCase("window-causal", 4, 2, 16, 5, (150, 70), window=20, causal=True),
)

KIMI = PagedCase("kimi-k2.6", 64, 8, 128, 8, (131_072,))
"""z-lab's Kimi-K2.6-DFlash; one of eight ranks has 8 heads and 1 KV head."""
