"""What a draft tree is worth: the tokens that a step with it is expected to emit.

A node's exp(score) is the chance, under the drafter, that the walk reaches it. The walk emits one
token for every node that it reaches and one more, so the expectation is 1 plus their sum.
"""

from __future__ import annotations

from torch import Tensor

from kdtree_engine.types import DraftTree


def expected_by_budget(tree: DraftTree) -> Tensor:
    """[n+1] float64: entry b is the expectation for the tree of the first b nodes.

    Nodes are made best first, so those are the best tree of b nodes.
    """
    return tree.scores.exp().cumsum(0)  # the root's score is 0, which gives the 1


def expected_tokens(tree: DraftTree) -> float:
    """The expected number of tokens that a step with this tree emits, at least 1."""
    return float(expected_by_budget(tree)[-1])
