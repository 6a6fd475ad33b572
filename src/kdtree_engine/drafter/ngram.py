"""Prompt lookup as a tree: what followed the same words earlier is likely to follow them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from kdtree_engine.drafter.base import DraftState, empty_block
from kdtree_engine.types import DraftBlock

_SEARCHED = 4096  # most recent tokens looked through
_DOUBT = 0.5  # weight of "something else" beside the matches


class NgramDrafter:
    """Drafts from the request's own text, without a model.

    All earlier places that end in the longest repeated suffix (at most `longest` tokens) vote for
    what they were followed by, later places with more weight. Votes are counted per depth.
    """

    name = "ngram"
    trained = False
    on_device: Literal[False] = False
    tap_layers: tuple[int, ...] = ()

    def __init__(self, horizon: int = 7, longest: int = 4, matches: int = 16) -> None:
        self.horizon = horizon
        self.longest = longest
        self.matches = matches

    def propose(self, states: Sequence[DraftState], candidates: int) -> list[DraftBlock]:
        """One block a request, empty where nothing repeats."""
        return [self._block(list(state.tokens[-_SEARCHED:]), candidates) for state in states]

    def _block(self, tokens: list[int], candidates: int) -> DraftBlock:
        places = self._places(tokens)
        votes: list[dict[int, float]] = []
        for depth in range(self.horizon):
            count: dict[int, float] = {}
            for age, place in enumerate(places):
                if place + depth < len(tokens):
                    token = tokens[place + depth]
                    count[token] = count.get(token, 0.0) + 1.0 / (1.0 + age)
            if not count:
                break
            votes.append(count)
        if not votes:
            return empty_block()
        width = min(candidates, max(len(count) for count in votes))
        ids = torch.zeros(len(votes), width, dtype=torch.int64)
        shares = torch.zeros(len(votes), width)  # a share of 0 becomes -inf, which trees drop
        for depth, count in enumerate(votes):
            total = sum(count.values()) + _DOUBT
            best = sorted(count.items(), key=lambda item: (-item[1], item[0]))[:width]
            for rank, (token, weight) in enumerate(best):
                ids[depth, rank] = token
                shares[depth, rank] = weight / total
        return DraftBlock(ids, torch.log(shares))

    def _places(self, tokens: list[int]) -> list[int]:
        """Where a continuation of the longest repeated suffix begins, latest first."""
        for length in range(min(self.longest, len(tokens) - 1), 0, -1):
            suffix = tokens[-length:]
            found = [
                end
                for end in range(len(tokens) - 1, length - 1, -1)
                if tokens[end - 1] == suffix[-1] and tokens[end - length : end] == suffix
            ][: self.matches]
            if found:
                return found
        return []

    def reset(self, request: int) -> None:
        """Nothing to forget."""
