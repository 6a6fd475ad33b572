"""Named shapes and settings of sample, shared by tests and benches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """R rows over a vocabulary; logits of this spread, rounded to `grid` (0 = not) to make ties.

    A setting that lists several values gives them to the rows in turn.
    """

    rows: int
    vocab: int
    spread: float = 2.0
    grid: float = 0.0
    temperature: tuple[float, ...] = (1.0,)
    top_k: tuple[int, ...] = (0,)
    top_p: tuple[float, ...] = (1.0,)
    min_p: tuple[float, ...] = (0.0,)


CASES = {
    "greedy": Case(16, 3072, temperature=(0.0,)),
    "plain": Case(16, 3072),
    "demo step": Case(16, 3072, top_p=(0.95,)),
    "all filters": Case(16, 3072, top_k=(40,), top_p=(0.9,), min_p=(0.05,)),
    "mixed": Case(
        64,
        257,
        temperature=(0.0, 0.7, 1.0, 1.5, 0.01),
        top_k=(0, 1, 5, 300),
        top_p=(1.0, 0.9, 0.3),
        min_p=(0.0, 0.1),
    ),
    "flat": Case(16, 257, spread=0.01, top_p=(0.5, 0.1)),
    "ties": Case(16, 257, grid=1.0, top_k=(7, 0), top_p=(0.8, 1.0, 0.4)),
    "peaked": Case(17, 1000, spread=12.0, top_p=(0.95,), min_p=(0.0, 0.3)),
    "hot": Case(16, 257, temperature=(50.0,), top_p=(0.2,)),
    "kimi row": Case(1, 163_840, spread=4.0, top_p=(0.95,)),
}


def inputs(
    case: Case, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator's arguments in order; positions repeat, as siblings' do."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(case.rows, case.vocab, generator=generator) * case.spread
    if case.grid:
        logits = (logits / case.grid).round() * case.grid

    def column(values: tuple[float, ...] | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.tensor([values[row % len(values)] for row in range(case.rows)], dtype=dtype)

    return (
        logits,
        column(case.temperature, torch.float32),
        column(case.top_k, torch.int64),
        column(case.top_p, torch.float32),
        column(case.min_p, torch.float32),
        torch.full((case.rows,), seed, dtype=torch.int64),
        torch.arange(case.rows) // 2 + 100,
    )
