"""Named walks of tree_accept, shared by tests and benches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.tree_build import BuiltTrees, tree_build
from kdtree_engine.kernels.tree_build import cases as tree_cases


class Case(NamedTuple):
    """Trees of a tree_build case, and how often a row's pick is one of its own children."""

    trees: str
    agree: float


CASES = {
    "root only": Case("root only", 1.0),
    "none": Case("default", 0.0),
    "all": Case("word", 1.0),
    "most": Case("wide", 0.8),
    "peaked": Case("peaked", 0.9),
    "flat": Case("flat", 0.9),
    "beyond a word": Case("over a word", 0.9),
}


def inputs(case: Case, seed: int = 0) -> tuple[BuiltTrees, Tensor]:
    """Trees and picks [R, N] int64: a random child's token with chance `agree`, else no child's."""
    shape = tree_cases.CASES[case.trees]
    trees = tree_build(*tree_cases.inputs(shape, seed), shape.budget)
    generator = torch.Generator().manual_seed(seed + 1)
    stranger = shape.width + 100
    picks = torch.full_like(trees.tokens, stranger)
    chance = torch.rand(picks.shape, generator=generator) < case.agree
    for request, count in enumerate(trees.nodes.tolist()):
        for row in (torch.randperm(count, generator=generator) + 1).tolist():
            parent = int(trees.parents[request, row])
            if chance[request, parent]:
                picks[request, parent] = trees.tokens[request, row]
    return trees, picks
