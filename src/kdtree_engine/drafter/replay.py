"""Replay of a known answer, for tests: every depth and every sibling rank gets accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from kdtree_engine.drafter.base import DraftState, empty_block
from kdtree_engine.types import DraftBlock

_UNLIKELY = -30.0


class ReplayDrafter:
    """Plants the plain run's own tokens at chosen ranks among wrong ones.

    Each proposal hides the truth at one rank (0..ranks) of one depth, all ranks above it equally
    likely, and puts it first elsewhere. Depth and rank are drawn from (seed, position), so a run of
    some hundreds of steps accepts every pair that the node budget can hold.
    """

    name = "replay"
    trained = False
    on_device: Literal[False] = False
    tap_layers: tuple[int, ...] = ()

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        vocab_size: int,
        horizon: int = 7,
        ranks: int = 8,
        seed: int = 0,
    ) -> None:
        self.answers = [list(answer) for answer in answers]  # prompt and output together
        self.vocab_size = vocab_size
        self.horizon = horizon
        self.ranks = ranks
        self.seed = seed

    def propose(self, states: Sequence[DraftState], candidates: int) -> list[DraftBlock]:
        """Blocks as long as the known answer reaches."""
        return [self._block(state, candidates) for state in states]

    def _block(self, state: DraftState, candidates: int) -> DraftBlock:
        truth = self._truth(list(state.tokens))
        count = min(self.ranks + 1, candidates, self.vocab_size)
        if not truth or count < 1:
            return empty_block()
        generator = torch.Generator().manual_seed(
            (self.seed * 1_000_003 + len(state.tokens)) * 4_099 + len(truth)
        )
        depth = int(torch.randint(self.horizon, (), generator=generator))
        rank = int(torch.randint(count, (), generator=generator))
        tokens = torch.empty(len(truth), count, dtype=torch.int64)
        scores = torch.full((len(truth), count), _UNLIKELY)
        for row, true_token in enumerate(truth):
            wrong = torch.randperm(self.vocab_size, generator=generator)[: count + 1]
            wrong = wrong[wrong != true_token][: count - 1]
            place = min(rank, len(wrong)) if row == depth else 0
            tokens[row] = torch.cat((wrong[:place], torch.tensor([true_token]), wrong[place:]))
            scores[row, : place + 1] = -torch.log(torch.tensor(float(place + 1)))
        scores -= torch.arange(count) * 1e-4  # ranks stay in order
        return DraftBlock(tokens, scores)

    def _truth(self, tokens: list[int]) -> list[int]:
        for answer in self.answers:
            if len(answer) > len(tokens) and answer[: len(tokens)] == tokens:
                return answer[len(tokens) : len(tokens) + self.horizon]
        return []

    def reset(self, request: int) -> None:
        """Nothing to forget."""
