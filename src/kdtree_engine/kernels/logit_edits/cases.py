"""Named settings of logit_edits and random trees under them, shared by tests and benches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.logit_edits import (
    IN_PROMPT,
    IS_STOP,
    LENGTH,
    PHRASES,
    EditState,
    empty_edits,
)
from kdtree_engine.kernels.tree_mask import cases as tree_cases
from kdtree_engine.kernels.tree_mask import tree_mask


class Case(NamedTuple):
    """B trees of at most N rows at as many places, over V tokens.

    repetition, frequency, presence: the places take one each, in turn. bias: share of the tokens
    with a bias; of these every fourth is forbidden. quiet: in turn. phrases: how many a place. Text
    and trees use the first `words` tokens only, so that they repeat. inactive: every so many places
    has its settings but is not active; 0: none.
    """

    trees: int
    rows: int
    vocab: int = 257
    words: int = 12
    repetition: tuple[float, ...] = (1.0,)
    frequency: tuple[float, ...] = (0.0,)
    presence: tuple[float, ...] = (0.0,)
    bias: float = 0.0
    quiet: tuple[int, ...] = (0,)
    phrases: int = 0
    inactive: int = 0


CASES = {
    "off": Case(2, 9),
    "repetition": Case(3, 16, repetition=(1.3, 0.7, 1.0)),
    "frequency": Case(2, 64, frequency=(0.1, -0.7)),
    "presence": Case(2, 16, presence=(0.3, -1.1)),
    "bias": Case(2, 7, bias=0.5),
    "quiet": Case(4, 16, quiet=(0, 1, 3, 60)),
    "phrases": Case(3, 37, words=4, phrases=40),
    "root": Case(5, 1, 300, 4, (1.1,), (0.1,), (0.2,), 0.2, (1, 0), 20),
    "all": Case(6, 16, 611, 6, (1.1, 1.0), (0.1, 0.0), (0.2,), 0.2, (2, 0, 9), 30, 3),
    "word": Case(2, 64, 520, 5, (1.3,), (0.37,), (-0.2,), 0.1, (4, -1), 64),
    "kimi": Case(1, 64, 163_840, 40, (1.1,), (0.1,), (0.2,), 0.01, (3,), 64),
}


class Inputs(NamedTuple):
    """The operator's arguments in order."""

    logits: Tensor
    state: EditState
    places: Tensor
    tokens: Tensor
    ancestors: Tensor
    depths: Tensor


def random_state(case: Case, generator: torch.Generator) -> EditState:
    """Settings and texts of B places and of one more, which is not active."""
    state = empty_edits(case.trees + 1, case.vocab)
    few = min(case.words, case.vocab)

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=generator)

    for place in range(case.trees):
        prompt = draw(few, 9)
        output = draw(few, int(draw(30, 1)))
        state.words[place, prompt] |= IN_PROMPT
        state.words[place, draw(case.vocab, 9)] |= IS_STOP
        state.words[place, draw(few, 2)] |= IS_STOP
        state.words[place] += output.bincount(minlength=case.vocab).int()
        known = min(len(output), LENGTH - 1)
        state.recent[place, :known] = output.flip(0)[:known].int()
        chosen = torch.rand(case.vocab, generator=generator) < case.bias
        bias = torch.randn(case.vocab, generator=generator)
        bias[::4] = -torch.inf
        state.bias[place] = torch.where(chosen, bias, 0.0)
        for value, given in (
            (state.repetition, case.repetition),
            (state.frequency, case.frequency),
            (state.presence, case.presence),
            (state.quiet, case.quiet),
        ):
            value[place] = given[place % len(given)]
        for phrase in range(min(case.phrases, PHRASES)):
            # short ones match often; one is as long as it may be
            length = LENGTH if phrase == 0 else 2 + int(draw(3, 1))
            state.phrases[place, phrase, :length] = draw(few, length).int()
        if case.phrases and known == LENGTH - 1:
            state.phrases[place, 0, 1:] = state.recent[place]  # the root completes it
        state.active[place] = not (case.inactive and place % case.inactive == 0)
    return state


def inputs(case: Case, seed: int = 0, device: torch.device | str = "cpu") -> Inputs:
    """Random trees, on the device; some logits are zeros of both signs, infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    state = random_state(case, generator)
    parents = tree_cases.inputs(tree_cases.Case(case.trees, case.rows, case.rows), seed)
    few = min(case.words, case.vocab)
    tokens = torch.randint(0, few, parents.shape, generator=generator)
    tokens[:, 1:][parents[:, 1:] < 0] = -1  # padding; the root's token is known to the place
    depths = torch.zeros_like(parents)
    for row in range(1, case.rows):
        above = parents[:, row : row + 1]
        depth = depths.gather(1, above.clamp(min=0)) + 1
        depths[:, row : row + 1] = torch.where(above < 0, 0, depth)
    logits = torch.randn(parents.numel(), case.vocab, generator=generator) * 4
    odd = torch.rand(logits.shape, generator=generator)
    for least, value in ((0.99, 0.0), (0.98, -0.0), (0.97, torch.inf), (0.96, -torch.inf)):
        logits[(odd > least) & (odd <= least + 0.01)] = value
    logits[odd < 0.01] = torch.nan
    places = torch.randperm(case.trees, generator=generator)
    state = EditState(*(value.to(device) for value in vars(state).values()))
    rest = (places, tokens, tree_mask(parents), depths)
    return Inputs(logits.to(device), state, *(value.to(device) for value in rest))
