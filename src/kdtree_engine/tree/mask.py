"""Ancestor masks of the trees of one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdtree_engine.kernels.tree_mask import tree_mask
from kdtree_engine.types import DraftTree


def ancestor_bits(trees: Sequence[DraftTree], rows: int) -> Tensor:
    """Bit masks [len(trees), rows] int64 of trees with at most `rows` <= 64 rows each.

    Bit j of row i is set for j = i and every ancestor j of i; a padding row has its own bit alone.
    """
    parents = torch.full((len(trees), rows), -1, dtype=torch.int64)
    for index, tree in enumerate(trees):
        parents[index, : tree.nodes + 1] = tree.parents
    return tree_mask(parents)
