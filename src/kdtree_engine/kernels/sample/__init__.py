"""Operator: one token per row of logits, greedy or drawn with that row's own settings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.sample import reference


class Sampled(NamedTuple):
    """tokens: [R] int64. finite: [R] bool, False where the row cannot be sampled (see `sample`)."""

    tokens: Tensor
    finite: Tensor


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Sampled:
    """Sample logits [R, V] float32, V < 2^19; every setting is [R].

    temperature float32, 0 = the first of the largest logits; top_k int64, 0 = off; top_p float32,
    1 = off; min_p float32, 0 = off; seeds and positions int64, as in kernels/gumbel.
    A logit of -inf is a forbidden token. A row with a NaN, with +inf, or with no token left has
    finite = False and a meaningless token. A row's result depends on that row alone, to the bit.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and 0 < vocab < 2**19, f"logits [{rows}, {vocab}]"
    for value in (temperature, top_p, min_p):
        assert value.shape == (rows,) and value.dtype == torch.float32
    for value in (top_k, seeds, positions):
        assert value.shape == (rows,) and value.dtype == torch.int64
    return Sampled(*reference.sample(logits, temperature, top_k, top_p, min_p, seeds, positions))


__all__ = ["Sampled", "sample"]
