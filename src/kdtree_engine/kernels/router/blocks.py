"""Blocks of choices: at most T slots that go to the same expert, so that its weights are read once.

A slot is one choice of one row: row * top_k + choice. Every slot lies in exactly one block; the
number of blocks allotted depends on shapes alone, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """`expert` [B] int32, -1 for a block not used; `slots` [B, T] int32, rows * top_k where empty.

    The used blocks come first, by rising expert (by choice where there is one row), and a block's
    slots rise.
    """

    expert: Tensor
    slots: Tensor


def block_tokens(rows: int, top_k: int, experts: int) -> int:
    """Slots of a block, T: 8, the narrowest an MMA takes, until experts share many tokens."""
    load = rows * top_k / experts  # the mean over all experts; the busy ones have more
    if load <= 4:
        return 8
    if load <= 12:
        return 16
    return 32 if load <= 32 else 64


def block_bound(rows: int, top_k: int, experts: int, tokens: int) -> int:
    """The most blocks that any choice can need; a row chooses an expert at most once."""
    slots = rows * top_k
    busy = min(slots, experts)
    if rows <= tokens:
        return busy
    # `busy` experts with one slot each take a block each; `tokens` further slots take one more.
    return (busy * (tokens - 1) + slots) // tokens


def group_by_sort(chosen: Tensor, experts: int, tokens: int) -> Blocks:
    """Blocks of chosen [R, k] int32 by torch's own operators, for prompts of many rows.

    Nothing waits for the device, so the calls can be captured in a graph.
    """
    rows, top_k = chosen.shape
    device, count = chosen.device, rows * top_k
    bound = block_bound(rows, top_k, experts, tokens)
    by_expert, slot = torch.sort(chosen.flatten(), stable=True)
    borders = torch.arange(experts + 1, device=device, dtype=torch.int32)
    first = torch.searchsorted(by_expert, borders)  # [E + 1], where each expert's slots start
    blocks = (first[1:] - first[:-1] + tokens - 1) // tokens
    first_block = torch.cumsum(blocks, 0) - blocks
    index = by_expert.long()
    rank = torch.arange(count, device=device) - first[index]
    block = first_block[index] + rank // tokens
    expert = torch.full((bound,), -1, dtype=torch.int32, device=device)
    expert.scatter_(0, block, by_expert)  # slots of one block write the same value
    slots = torch.full((bound * tokens,), count, dtype=torch.int32, device=device)
    slots.scatter_(0, block * tokens + rank % tokens, slot.int())
    return Blocks(expert, slots.view(bound, tokens))
