"""Operators: move the accepted rows of a step from scratch to their places in the cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kdtree_engine.kernels.cache_commit import reference
from kdtree_engine.kernels.launch import has_kernel, launch_options

MAX_MOVED = 256
"""Rows that one program can hold; more fall back to the reference."""


def commit_rows(layers: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
    """In each of `layers` [pages, 64, ...], copy slots `source` [k] to slots `destination` [k].

    Slots are page * 64 + offset, int64. All rows of a layer are read before any is written, so that
    overlapping moves are safe. Destinations are distinct. The layers have one shape and dtype or,
    on the CPU, any.
    """
    if not layers or not len(source):
        return
    if has_kernel(layers[0]) and len(source) <= MAX_MOVED and _words(layers[0]):
        _launch_rows(layers, source, destination)
    else:
        reference.commit_rows(layers, source, destination)


def commit_paths_device(
    layers: Sequence[Tensor],
    slots: Tensor,
    indices: Tensor,
    lengths: Tensor,
    contexts: Tensor,
    pages: Tensor,
    spill_slot: int,
) -> None:
    """Move the accepted rows of R trees, with nothing known to the host; one launch on CUDA.

    layers: [total_pages, page, ...], of one shape and dtype. slots [R, N] int64: where the trees'
    rows lie. indices [R, length] and lengths [R] int64: as tree_accept makes them, length <= 64.
    contexts [R] int32: the position of the first accepted row. pages [R, P] int32: the requests'
    pages. Row indices[r, j] goes to position contexts[r] + j, for j < lengths[r]; one beyond the P
    pages goes nowhere (on the CPU: to spill_slot, which takes writes that nobody reads). The slots
    of one request are not destinations of another.
    """
    assert slots.dtype == indices.dtype == lengths.dtype == torch.int64
    assert contexts.dtype == pages.dtype == torch.int32
    assert 0 < indices.shape[1] <= 64, f"paths of {indices.shape[1]} rows"
    requests = len(slots)
    assert all(len(value) == requests for value in (indices, lengths, contexts, pages))
    if not layers or not requests:
        return
    if has_kernel(layers[0]) and _words(layers[0]):
        _launch_paths(layers, slots, indices, lengths, contexts, pages)
    else:
        reference.commit_paths(layers, slots, indices, lengths, contexts, pages, spill_slot)


def columns_for(rows: int) -> int:
    """Words of a row that a program moves: with `rows` rows of them it stays in registers."""
    return max(32, min(512, 4096 // rows))


def _words(layer: Tensor) -> int:
    """32-bit words of a cache row; 0 where it does not consist of whole ones."""
    size = layer[0, 0].numel() * layer.element_size()
    return 0 if size % 4 else size // 4


def _aligned(layers: Sequence[Tensor]) -> bool:
    """Whether loads of four words may be used."""
    return all(layer.data_ptr() % 16 == 0 for layer in layers)


def _table(layers: Sequence[Tensor]) -> Tensor:
    """Addresses of the layers on their device, [layers] int64."""
    one = layers[0]
    assert all(layer.shape == one.shape and layer.dtype == one.dtype for layer in layers)
    assert all(layer.is_contiguous() for layer in layers)
    return _addresses(tuple(layer.data_ptr() for layer in layers), one.device)


# Never evicted: a captured graph keeps the table's address. First filled by the call that warms a
# graph up, since a capture cannot copy from the host.
@functools.cache
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(pointers, dtype=torch.int64, device=device)


def _launch_rows(layers: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
    from triton import next_power_of_2

    from kdtree_engine.kernels.cache_commit.kernel import rows_kernel

    words, rows = _words(layers[0]), next_power_of_2(len(source))
    columns = columns_for(rows)
    rows_kernel[len(layers), -(-words // columns)](
        _table(layers),
        source.contiguous(),
        destination.contiguous(),
        len(source),
        words,
        ROWS=rows,
        COLUMNS=columns,
        ALIGNED=_aligned(layers),
        **launch_options(source),
    )


def _launch_paths(
    layers: Sequence[Tensor],
    slots: Tensor,
    indices: Tensor,
    lengths: Tensor,
    contexts: Tensor,
    pages: Tensor,
    columns: int = 0,
) -> None:
    from triton import next_power_of_2

    from kdtree_engine.kernels.cache_commit.kernel import paths_kernel

    words, rows = _words(layers[0]), next_power_of_2(indices.shape[1])
    columns = columns or columns_for(rows)
    paths_kernel[len(layers), -(-words // columns), len(slots)](
        _table(layers),
        slots.contiguous(),
        indices.contiguous(),
        lengths.contiguous(),
        contexts.contiguous(),
        pages.contiguous(),
        slots.shape[1],
        indices.shape[1],
        pages.shape[1],
        words,
        PAGE=layers[0].shape[1],
        ROWS=rows,
        COLUMNS=columns,
        ALIGNED=_aligned(layers),
        **launch_options(slots),
    )


__all__ = ["commit_paths_device", "commit_rows"]
