"""No drafts: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from kdtree_engine.drafter.base import DraftState, Observation, empty_block
from kdtree_engine.types import DraftBlock


class NoDrafter:
    """Proposes nothing, so every tree is its root."""

    name = "none"
    trained = False
    horizon = 0
    tap_layers: tuple[int, ...] = ()

    def propose(self, states: Sequence[DraftState], candidates: int) -> list[DraftBlock]:
        """Empty blocks."""
        return [empty_block() for _ in states]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def reset(self, request: int) -> None:
        """Nothing to forget."""
