"""Operator: draft trees of at most `budget` nodes from per-depth candidates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.tree_build import reference


class BuiltTrees(NamedTuple):
    """R trees, padded to budget + 1 rows; row 0 of each is the root.

    tokens, parents, depths: [R, budget+1] int64. scores: [R, budget+1] float64. nodes: [R] int64,
    the number of nodes besides the root. A padding row has token -1, parent -1, depth 0 and score
    -inf; the root has token -1, parent -1, depth 0 and score 0.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    nodes: Tensor


def tree_build(log_probs: Tensor, tokens: Tensor, budget: int) -> BuiltTrees:
    """Build R trees from log_probs [R, H, K] (float32) and tokens [R, H, K] (int64).

    H, K and the budget may be 0. Rows are made best first: falling score, equal scores by the
    smaller tuple of ranks. Non-finite candidates are dropped.
    """
    assert log_probs.ndim == 3, f"log_probs must be [R, H, K], not {list(log_probs.shape)}"
    assert log_probs.shape == tokens.shape, f"{list(log_probs.shape)} and {list(tokens.shape)}"
    assert log_probs.is_floating_point() and tokens.dtype == torch.int64
    assert budget >= 0, f"a budget of {budget} nodes"
    return BuiltTrees(*reference.tree_build(log_probs, tokens, budget))


__all__ = ["BuiltTrees", "tree_build"]
