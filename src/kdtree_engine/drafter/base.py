"""The one protocol of all drafters. A drafter never decides correctness, only speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kdtree_engine.types import DraftBlock


@dataclass(frozen=True, eq=False)
class DraftState:
    """A decoding request as its drafter sees it.

    request: its id. tokens: prompt and output so far, the root last. context: committed tokens, the
    root's position. pages: [P] int64, the request's cache pages. seed, temperature: how its tokens
    are drawn, so that a drafter may guess the draw and not only the distribution.
    """

    request: int
    tokens: Sequence[int]
    context: int
    pages: Tensor
    seed: int
    temperature: float = 0.0


@dataclass(frozen=True, eq=False)
class Observation:
    """Rows of one request that were just committed: k consecutive positions from `first` on.

    slots: [k] their cache slots. taps: [k, n * H] the target's tapped outputs, None if not asked
    for.
    """

    request: int
    first: int
    slots: Sequence[int]
    taps: Tensor | None


class Drafter(Protocol):
    """Proposes likely continuations of the root."""

    name: str
    trained: bool  # whether few accepted drafts are a sign of something broken
    horizon: int  # positions proposed in one pass; a checkpoint's property, not the node budget
    tap_layers: tuple[int, ...]  # target layers whose outputs `observe` wants

    def propose(self, states: Sequence[DraftState], candidates: int) -> list[DraftBlock]:
        """One block a request: at most `candidates` tokens at each of at most `horizon` depths."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Take in rows that the target has committed, each position of a request once, in order."""

    def reset(self, request: int) -> None:
        """Forget a request: its id is not used again, its pages may go to others."""


def empty_block() -> DraftBlock:
    """A proposal of nothing: the step decodes plainly."""
    return DraftBlock(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0))
