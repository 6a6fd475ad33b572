"""Named shapes of gumbel, shared by tests and benches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """R rows over a vocabulary; `shared` rows in turn have the same seed and position."""

    rows: int
    vocab: int
    shared: int = 1


CASES = {
    "one": Case(1, 1),
    "odd": Case(3, 257),
    "demo step": Case(16, 3072, 2),
    "demo batch": Case(64, 3072, 4),
    "kimi row": Case(1, 163_840),
}


def inputs(case: Case, seed: int = 0) -> tuple[Tensor, Tensor]:
    """seeds and positions [R] int64; seeds span all 64 bits, positions exceed 32."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(case.rows) // case.shared
    low, high = -(2**63), 2**63 - 1
    seeds = torch.randint(low, high, (case.rows,), generator=generator)[group]
    positions = torch.randint(0, 2**40, (case.rows,), generator=generator)[group]
    return seeds, positions
