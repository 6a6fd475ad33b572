"""Draft trees: build one, see its masks, walk it, value it."""

from kdtree_engine.tree.accept import accept
from kdtree_engine.tree.build import build_tree, chain_tree
from kdtree_engine.tree.mask import ancestor_bits
from kdtree_engine.tree.objective import expected_by_budget, expected_tokens
from kdtree_engine.types import AcceptedPath, DraftBlock, DraftTree

__all__ = [
    "AcceptedPath",
    "DraftBlock",
    "DraftTree",
    "accept",
    "ancestor_bits",
    "build_tree",
    "chain_tree",
    "expected_by_budget",
    "expected_tokens",
]
