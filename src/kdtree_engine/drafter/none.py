"""No drafts: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kdtree_engine.drafter.base import DraftState, empty_block
from kdtree_engine.types import DraftBlock


class NoDrafter:
    """Proposes nothing, so every tree is its root."""

    name = "none"
    trained = False
    on_device: Literal[False] = False
    horizon = 0
    tap_layers: tuple[int, ...] = ()

    def propose(self, states: Sequence[DraftState], candidates: int) -> list[DraftBlock]:
        """Empty blocks."""
        return [empty_block() for _ in states]

    def reset(self, request: int) -> None:
        """Nothing to forget."""
