"""The cache's tensors: the target's latents and, beside them, the drafter's context keys and
values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.cache.layout import CacheLayout
from kdtree_engine.config import PAGE_SIZE


@dataclass(frozen=True, eq=False)
class CachePool:
    """latents: one [total_pages, 64, kv_lora + rope] a target layer.

    draft: one [total_pages, 64, 2, kv_heads, head_dim] a draft layer (keys, then values), under the
    same page numbers, so that sharing a page shares both.
    """

    layout: CacheLayout
    latents: tuple[Tensor, ...]
    draft: tuple[Tensor, ...] = ()


def allocate_pool(
    layout: CacheLayout,
    layers: int,
    latent_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    draft_layers: int = 0,
    draft_shape: tuple[int, int] = (0, 0),
) -> CachePool:
    """A pool of zeros. `draft_shape` is (kv_heads, head_dim) of the drafter."""
    pages = layout.total_pages

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(pages, PAGE_SIZE, *shape, dtype=dtype, device=device)

    return CachePool(
        layout,
        tuple(zeros(latent_dim) for _ in range(layers)),
        tuple(zeros(2, *draft_shape) for _ in range(draft_layers)),
    )
