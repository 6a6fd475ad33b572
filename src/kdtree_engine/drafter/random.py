"""Random drafts, for tests: correct output must not depend on what is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from kdtree_engine.drafter.base import DraftState
from kdtree_engine.types import DraftBlock


class RandomDrafter:
    """Random tokens with random probabilities, a function of (seed, request's tokens so far)."""

    name = "random"
    trained = False
    on_device: Literal[False] = False
    tap_layers: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, horizon: int = 7, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.horizon = horizon
        self.seed = seed

    def propose(self, states: Sequence[DraftState], candidates: int) -> list[DraftBlock]:
        """Distinct random tokens at each depth; sharpness differs from depth to depth."""
        return [self._block(state, min(candidates, self.vocab_size)) for state in states]

    def _block(self, state: DraftState, candidates: int) -> DraftBlock:
        generator = torch.Generator().manual_seed(
            hash((self.seed, len(state.tokens), state.tokens[-1])) & (2**63 - 1)
        )
        logits = torch.randn(self.horizon, self.vocab_size, generator=generator)
        sharpness = torch.rand(self.horizon, 1, generator=generator) * 8.0
        top = torch.log_softmax(logits * sharpness, -1).topk(candidates, -1)
        return DraftBlock(top.indices, top.values)

    def reset(self, request: int) -> None:
        """Nothing to forget."""
