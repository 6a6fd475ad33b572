"""Named trees of tree_mask and tree_accept, shared by tests and benches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """R trees of at most N rows; `reach` is how far above itself a row finds its parent."""

    requests: int
    rows: int
    reach: int


CASES = {
    "root": Case(1, 1, 1),
    "pair": Case(2, 2, 1),
    "chain": Case(1, 64, 1),
    "default": Case(1, 16, 16),
    "word": Case(1, 64, 64),
    "bushy": Case(4, 64, 8),
    "many": Case(32, 16, 6),
    "odd": Case(3, 37, 5),
}


def inputs(case: Case, seed: int = 0) -> Tensor:
    """parents [R, N] int64: random trees, each padded with -1 after a random number of rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(case.rows)
    draw = torch.randint(1, case.reach + 1, (case.requests, case.rows), generator=generator)
    parents = (rows - draw).clamp(min=0)
    parents[:, 0] = -1
    sizes = torch.randint(1, case.rows + 1, (case.requests, 1), generator=generator)
    sizes[0] = case.rows  # one of them is full
    return torch.where(rows < sizes, parents, -1)
