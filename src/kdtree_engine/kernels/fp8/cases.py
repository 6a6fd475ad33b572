"""Named weights of the FP8 operator, shared by tests and benches."""

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
    "one_value": Case(1, 1),
    "one_block": Case(128, 128),
    "inside_a_block": Case(7, 96),
    "partial_edges": Case(192, 320),
    "tiny_values": Case(130, 129, spread=1e-30),
    "large_values": Case(130, 129, spread=1e4),
    "kv_a": Case(576, 256),
}


def inputs(case: Case, seed: int = 0) -> Tensor:
    """Random float32 [rows, columns] whose spread differs from block to block."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(case.rows, case.columns, generator=generator) * case.spread
    block = torch.arange(case.rows)[:, None] // 128 * 3 + torch.arange(case.columns) // 128
    return weight * 2.0 ** (block % 5 - 2)
