"""Gather every accepted row first, then write: source and destination may overlap."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def commit_rows(layers: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
    """In each of `layers` [pages, 64, ...], copy slots `source` [k] to slots `destination` [k].

    Slots are page * 64 + offset, int64. All rows of a layer are read before any is written, so that
    overlapping moves are safe. Destinations are distinct.
    """
    for layer in layers:
        rows = layer.view(-1, *layer.shape[2:])
        rows.index_copy_(0, destination, rows.index_select(0, source))
