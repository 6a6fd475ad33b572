"""Named shapes of tree_build, shared by tests and benches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """R requests, H depths, K candidates a depth, a budget, and how peaked the drafter is."""

    requests: int
    horizon: int
    width: int
    budget: int
    spread: float
    ties: bool = False


CASES = {
    "root only": Case(1, 7, 3, 0, 2.0),
    "one node": Case(1, 7, 3, 1, 2.0),
    "no horizon": Case(2, 0, 3, 7, 2.0),
    "one depth": Case(1, 1, 16, 15, 2.0),
    "default": Case(1, 7, 15, 15, 2.0),
    "word": Case(1, 7, 63, 63, 2.0),
    "peaked": Case(2, 7, 63, 63, 12.0),
    "flat": Case(2, 7, 63, 63, 0.01),
    "ties": Case(3, 5, 9, 31, 1.0, True),
    "wide": Case(8, 15, 31, 31, 2.0),
    "exhausted": Case(1, 2, 2, 63, 1.0),
    "over a word": Case(1, 15, 300, 300, 2.0),
}


def inputs(case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    """log_probs [R, H, K] float32, descending, and tokens [R, H, K] int64, distinct per depth.

    With ties, log-probabilities are small multiples of 1/4, so sums are exact and often equal.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (case.requests, case.horizon, case.width)
    logits = torch.randn(shape, generator=generator) * case.spread
    log_probs = -(logits.abs() * 4).round() / 4 if case.ties else logits.log_softmax(-1)
    log_probs = log_probs.sort(dim=-1, descending=True).values
    order = torch.rand((*shape[:2], case.width + 5), generator=generator).argsort(-1)
    return log_probs, order[..., : case.width].contiguous()
