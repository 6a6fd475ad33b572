"""Commit accepted paths: their rows leave scratch for their requests' next places."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.cache.layout import CacheLayout
from kdtree_engine.cache.pool import CachePool
from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.kernels.cache_commit import commit_paths_device


def commit_paths(
    pool: CachePool,
    slots: Tensor,
    indices: Tensor,
    lengths: Tensor,
    contexts: Tensor,
    pages: Tensor,
) -> None:
    """Move the rows of B paths in every layer of the target's cache.

    slots: [B, N] int64, where the rows of each request's tree lie. indices: [B, L] int64, rows of
    the tree. lengths: [B] int64, how many of them count. contexts: [B] int32, committed tokens, the
    position of the first. pages: [B, P] int32.
    """
    spill = pool.layout.spill_slot
    commit_paths_device(pool.latents, slots, indices, lengths, contexts, pages, spill)


def path_places(
    layout: CacheLayout, length: int, lengths: Tensor, contexts: Tensor, pages: Tensor
) -> tuple[Tensor, Tensor]:
    """Positions and slots [B, length] int64 of the rows that `commit_paths` moves.

    Entries that do not count stand at the first one's position, in the spill page: so the shapes
    do not depend on the paths.
    """
    steps = torch.arange(length, device=lengths.device)
    counts = steps < lengths[:, None]
    positions = contexts[:, None] + torch.where(counts, steps, 0)
    slots = pages.gather(1, positions // PAGE_SIZE).long() * PAGE_SIZE + positions % PAGE_SIZE
    return positions, torch.where(counts, slots, layout.spill_slot)
