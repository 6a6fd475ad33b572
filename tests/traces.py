"""Draft trees of a step as the command draws them, over a vocabulary of ten words."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kdtree_engine.types import AcceptedPath, DraftTree

WORDS = ["def", " read", "(", ")", ":", "\n", "x", "y", "z", "é"]


def tree(tokens: list[int], parents: list[int], probabilities: list[float]) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return DraftTree(
        torch.tensor(tokens),
        torch.tensor(parents),
        torch.tensor(depths),
        torch.tensor(probabilities, dtype=torch.float64).log(),
    )


# Root "def"; " read" (accepted) forks into "(" (accepted) and ":"; a rejected "x" at depth 1.
FORKED = SimpleNamespace(
    tree=tree([-1, 1, 2, 6, 4], [-1, 0, 1, 0, 1], [1.0, 0.5, 0.25, 0.2, 0.1]),
    path=AcceptedPath([0, 1, 2], 3),
    root=0,
)
