"""Draft trees: build one, see its masks, walk it, value it."""

from ..types import AcceptedPath, DraftBlock, DraftTree
from .accept import accept
from .build import build_tree, chain_tree
from .mask import ancestor_bits
from .objective import expected_by_budget, expected_tokens

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
