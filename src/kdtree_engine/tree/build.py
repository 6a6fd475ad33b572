"""Draft trees from a drafter's proposal."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.errors import OptionError
from kdtree_engine.kernels.tree_build import tree_build
from kdtree_engine.types import DraftBlock, DraftTree


def build_tree(log_probs: Tensor, tokens: Tensor, budget: int) -> DraftTree:
    """The `budget` likeliest nodes under a root, best first (DDTree, arXiv 2604.12989).

    log_probs: [H, K] float32, natural logarithms, each row descending (a row that is not is sorted
    first). tokens: [H, K] integers, the candidates they belong to. H and K may be 0.
    budget: the most nodes besides the root; fewer come where the candidates run out.
    Scores are summed in float64; equal scores go by the smaller tuple of ranks along the path;
    candidates that are not finite are dropped.
    Raises OptionError for a negative budget or shapes that do not fit.
    """
    if budget < 0:
        raise OptionError(f"a draft tree cannot have {budget} nodes; give 0 or more")
    if log_probs.ndim != 2 or log_probs.shape != tokens.shape:
        raise OptionError(
            f"log_probs {list(log_probs.shape)} and tokens {list(tokens.shape)} "
            "must both be [depths, candidates]"
        )
    built = tree_build(log_probs.cpu()[None], tokens.cpu().to(torch.int64)[None], budget)
    rows = int(built.nodes) + 1
    return DraftTree(
        tokens=built.tokens[0, :rows],
        parents=built.parents[0, :rows],
        depths=built.depths[0, :rows],
        scores=built.scores[0, :rows],
    )


def chain_tree(block: DraftBlock, length: int) -> DraftTree:
    """The drafter's likeliest token of each depth, one under the other: at most `length` nodes.

    The block's horizon, or the first depth without a finite candidate, ends it earlier.
    Raises OptionError for a negative length.
    """
    # Of equal candidates torch.max takes the first, as build_tree would.
    clean = torch.where(torch.isfinite(block.log_probs), block.log_probs, -torch.inf)
    if clean.shape[1] == 0:
        return build_tree(clean, block.tokens, length)
    best = clean.max(dim=1, keepdim=True)
    return build_tree(best.values, block.tokens.gather(1, best.indices), length)
