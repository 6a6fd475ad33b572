"""Operator: the longest path of each draft tree that the target agrees with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.tree_accept import reference


class AcceptedPaths(NamedTuple):
    """R paths. indices: [R, length] int64, tree rows from the root (0) on, rising, padded with -1.

    lengths: [R] int64, rows accepted, root included. next_tokens: [R] int64, the target's token
    after the last accepted row.
    """

    indices: Tensor
    lengths: Tensor
    next_tokens: Tensor


def tree_accept(tokens: Tensor, parents: Tensor, picks: Tensor, length: int) -> AcceptedPaths:
    """Walk R trees: from a row to its child whose token the target picked there, until none is.

    tokens, parents: [R, N] int64 as tree_build makes them (a padding row has parent -1 and is
    never reached). picks: [R, N] int64, the target's token after each row. length: the deepest
    tree's depth plus 1. Of two children with one token the first counts.
    """
    assert tokens.shape == parents.shape == picks.shape and tokens.ndim == 2, (
        f"tokens {list(tokens.shape)}, parents {list(parents.shape)}, picks {list(picks.shape)}"
    )
    assert tokens.dtype == parents.dtype == picks.dtype == torch.int64
    assert length >= 1
    return AcceptedPaths(*reference.tree_accept(tokens, parents, picks, length))


__all__ = ["AcceptedPaths", "tree_accept"]
