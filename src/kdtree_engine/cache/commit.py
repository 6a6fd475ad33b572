"""Commit an accepted path: its rows leave scratch for the request's next places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtree_engine.cache.pool import CachePool
from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.kernels.cache_commit import commit_rows


def page_slots(pages: Sequence[int], first: int, count: int) -> list[int]:
    """Slots of the positions first..first+count-1 of a request with these pages."""
    return [
        pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        for position in range(first, first + count)
    ]


def commit_paths(pool: CachePool, source: Sequence[int], destination: Sequence[int]) -> None:
    """Move the rows at slots `source` to slots `destination` in every layer, all at once."""
    if not source:
        return
    device = pool.latents[0].device
    commit_rows(
        pool.latents,
        torch.tensor(source, dtype=torch.int64, device=device),
        torch.tensor(destination, dtype=torch.int64, device=device),
    )
