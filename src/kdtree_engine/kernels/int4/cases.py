"""Named weights of the INT4 operator, shared by tests and benches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """A weight [rows, columns] in elements; `spread` is the standard deviation of its values."""

    rows: int
    columns: int
    spread: float = 0.02


CASES = {
    "one_group": Case(1, 32),
    "odd_rows": Case(7, 96),
    "tiny_values": Case(5, 64, spread=1e-30),
    "large_values": Case(5, 64, spread=1e4),
    "demo_gate": Case(64, 256),
    "k2_slice": Case(64, 7168),
}


def inputs(case: Case, seed: int = 0) -> Tensor:
    """Random float32 [rows, columns]; the first group is zeros, the last value an outlier."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(case.rows, case.columns, generator=generator) * case.spread
    weight[0, :32] = 0.0
    weight[-1, -1] = 40 * case.spread
    return weight
