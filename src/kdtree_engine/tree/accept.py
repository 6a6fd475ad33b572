"""The path of a draft tree that the target agrees with."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.tree_accept import tree_accept
from kdtree_engine.types import AcceptedPath, DraftTree


def accept(tree: DraftTree, picks: Tensor) -> AcceptedPath:
    """Walk from the root to the child whose token the target picked, as far as there is one.

    picks: [n+1] integers, the target's token after each row of the tree.
    """
    assert picks.shape == tree.tokens.shape, f"{list(picks.shape)} picks for {tree.nodes + 1} rows"
    # No path is longer than the deepest row's depth, nor than the tree.
    paths = tree_accept(
        tree.tokens[None],
        tree.parents[None],
        picks.cpu().to(torch.int64)[None],
        int(tree.depths.max()) + 1,
    )
    length = int(paths.lengths)
    return AcceptedPath(paths.indices[0, :length].tolist(), int(paths.next_tokens))
