"""Ancestor masks of padded trees, by pointer doubling."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_mask(parents: Tensor) -> Tensor:
    """See the operator. parents [R, N] int64, N <= 64."""
    rows = parents.shape[1]
    own = torch.ones(rows, dtype=torch.int64, device=parents.device)
    own = own << torch.arange(rows, device=parents.device)  # bit 63 is the sign
    bits = own.expand_as(parents).contiguous()
    jump = parents
    for _ in range(max(rows - 1, 0).bit_length()):
        # bits covers 2^k ancestors, itself included, and jump leads to the 2^k-th above
        above = jump.clamp(min=0)
        bits = torch.where(jump >= 0, bits | bits.gather(1, above), bits)
        jump = torch.where(jump >= 0, jump.gather(1, above), jump)
    return bits


def tree_visibility(parents: Tensor) -> Tensor:
    """See the operator. parents [R, N] int64, any N."""
    rows = parents.shape[1]
    seen = torch.eye(rows, dtype=torch.bool, device=parents.device).repeat(len(parents), 1, 1)
    jump = parents
    for _ in range(max(rows - 1, 0).bit_length()):
        above = jump.clamp(min=0)
        step = seen.gather(1, above[:, :, None].expand_as(seen))
        seen = seen | (step & (jump >= 0)[:, :, None])
        jump = torch.where(jump >= 0, jump.gather(1, above), jump)
    return seen
