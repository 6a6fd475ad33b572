"""The protocols of all drafters. A drafter never decides correctness, only speed.

A **device drafter** works on the tensors of the step, without reading them, so it is a part of the
captured step. A **host drafter** works on the requests' tokens as lists; the engine has to read one
step's result before such a drafter can propose for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kdtree_engine.types import DraftBlock, DraftBlocks


@dataclass(frozen=True, eq=False)
class DraftState:
    """A decoding request as a host drafter sees it: its id, and prompt and output, root last."""

    request: int
    tokens: Sequence[int]


@dataclass(frozen=True, eq=False)
class DraftStates:
    """B decoding requests as a device drafter sees them.

    roots: [B] int64. contexts: [B] int32, committed tokens, the roots' positions. pages: [B, P]
    int32, cache pages in order. seeds [B] int64, temperatures [B] float32: how the tokens are
    drawn, so that a drafter may guess the draw and not only the distribution.
    """

    roots: Tensor
    contexts: Tensor
    pages: Tensor
    seeds: Tensor
    temperatures: Tensor


class _Drafter(Protocol):
    """What every drafter says of itself."""

    name: str
    trained: bool  # whether few accepted drafts are a sign of something broken
    horizon: int  # positions proposed in one pass; a checkpoint's property, not the node budget
    tap_layers: tuple[int, ...]  # target layers whose outputs `observe` wants

    def reset(self, request: int) -> None:
        """Forget a request: its id is not used again, its pages may go to others."""


class HostDrafter(_Drafter, Protocol):
    """Proposes from the text alone; it is shown nothing else, so its `tap_layers` are empty."""

    on_device: Literal[False]

    def propose(self, states: Sequence[DraftState], candidates: int) -> list[DraftBlock]:
        """One block a request: at most `candidates` tokens at each of at most `horizon` depths."""


class DeviceDrafter(_Drafter, Protocol):
    """Proposes from what the target's rows told it."""

    on_device: Literal[True]

    def propose(self, states: DraftStates, candidates: int) -> DraftBlocks:
        """At most `candidates` tokens at each of `horizon` depths, without reading a value."""

    def observe(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Take in R committed rows: taps [R, n * H], positions and cache slots [R] int64.

        Each position of a request comes once, in order; rows that were not committed come too,
        with a slot of the spill page.
        """


Drafter = HostDrafter | DeviceDrafter


def empty_block() -> DraftBlock:
    """A proposal of nothing: the step decodes plainly."""
    return DraftBlock(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0))


def stack_blocks(
    blocks: Sequence[DraftBlock], requests: int = 0, horizon: int = 0, candidates: int = 0
) -> DraftBlocks:
    """Blocks side by side, padded to the largest, and to at least the sizes given."""
    depths = max([horizon, *(block.horizon for block in blocks)])
    width = max([candidates, *(int(block.tokens.shape[1]) for block in blocks)])
    if len(blocks) == 1 and requests <= 1 and blocks[0].tokens.shape == (depths, width):
        return DraftBlocks(blocks[0].tokens[None], blocks[0].log_probs[None])
    shape = (max(requests, len(blocks)), depths, width)
    tokens = torch.zeros(shape, dtype=torch.int64)
    log_probs = torch.full(shape, -torch.inf)
    for index, block in enumerate(blocks):
        rows, columns = block.tokens.shape
        tokens[index, :rows, :columns] = block.tokens
        log_probs[index, :rows, :columns] = block.log_probs
    return DraftBlocks(tokens, log_probs)
