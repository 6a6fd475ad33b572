"""Seeds, and the noise they give at each position.

The noise of a token is a function of the request's seed and the token's absolute position alone,
so a request draws the same text whether it is decoded plainly, through any tree, or in any batch.
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from kdtree_engine.kernels.gumbel import gumbel as _gumbel


def draw_seed() -> int:
    """A fresh seed in 0..2^63-1 for a request that gave none; report it with the output."""
    return secrets.randbits(63)


def seed_word(seed: int) -> int:
    """Any integer's low 64 bits as an int64, the form that tensors of seeds hold."""
    low = seed % 2**64
    return low - 2**64 if low >= 2**63 else low


def gumbel(
    seeds: Tensor, positions: Tensor, vocab: int, device: torch.device | str | None = None
) -> Tensor:
    """Standard Gumbel noise [R, vocab] float32 for seeds and positions [R] int64.

    positions: those of the tokens being chosen. device: where to compute and return it, by default
    where the seeds are. The counter layout is in kernels/gumbel.
    """
    target = seeds.device if device is None else torch.device(device)
    return _gumbel(seeds.to(target), positions.to(target), vocab)


__all__ = ["draw_seed", "gumbel", "seed_word"]
