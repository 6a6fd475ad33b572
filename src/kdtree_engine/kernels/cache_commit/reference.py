"""Gather every accepted row first, then write: source and destination may overlap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def commit_rows(layers: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
    """See the operator."""
    for layer in layers:
        rows = layer.view(-1, *layer.shape[2:])
        rows.index_copy_(0, destination, rows.index_select(0, source))


def destinations(
    indices: Tensor, lengths: Tensor, contexts: Tensor, pages: Tensor, page: int, spill_slot: int
) -> Tensor:
    """Slots [R, length] of the accepted rows; spill_slot where a row goes nowhere."""
    step = torch.arange(indices.shape[1], device=indices.device)
    position = contexts.to(torch.int64)[:, None] + step
    number = position // page
    moved = (step < lengths[:, None]) & (number < pages.shape[1])
    found = pages.to(torch.int64).gather(1, number.clamp(max=pages.shape[1] - 1))
    return torch.where(moved, found * page + position % page, spill_slot)


def commit_paths(
    layers: Sequence[Tensor],
    slots: Tensor,
    indices: Tensor,
    lengths: Tensor,
    contexts: Tensor,
    pages: Tensor,
    spill_slot: int,
) -> None:
    """See the operator. Shapes are fixed: rows that go nowhere are written to the spill slot."""
    page = layers[0].shape[1]
    new = destinations(indices, lengths, contexts, pages, page, spill_slot).flatten()
    old = slots.gather(1, indices.clamp(min=0)).flatten()
    commit_rows(layers, old, new)
