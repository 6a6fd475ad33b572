"""Operator: which rows of its tree a row attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import has_kernel, launch_options
from kdtree_engine.kernels.tree_mask import reference

MAX_ROWS = 64


def tree_mask(parents: Tensor) -> Tensor:
    """Ancestor bits [R, N] int64 of trees given by parents [R, N] int64, N <= 64.

    Bit j of row i is set for j = i and for every ancestor j of i. A parent of -1 marks a root or a
    padding row, which sees itself alone. Parents come before their children.
    """
    assert parents.ndim == 2 and parents.dtype == torch.int64, f"parents {list(parents.shape)}"
    assert parents.shape[1] <= MAX_ROWS, f"{parents.shape[1]} rows do not fit in a 64-bit word"
    if has_kernel(parents):
        return _launch_mask(parents)
    return reference.tree_mask(parents)


def _launch_mask(parents: Tensor) -> Tensor:
    from triton import next_power_of_2

    from kdtree_engine.kernels.tree_mask.kernel import mask_kernel

    parents = parents.contiguous()
    requests, rows = parents.shape
    bits = torch.empty_like(parents)
    if parents.numel():
        mask_kernel[(requests,)](
            parents, bits, rows, NP=next_power_of_2(rows), num_warps=1, **launch_options(parents)
        )
    return bits


def tree_visibility(parents: Tensor) -> Tensor:
    """The same as a matrix [R, N, N] bool, for any N: row i is True at i and its ancestors."""
    assert parents.ndim == 2 and parents.dtype == torch.int64, f"parents {list(parents.shape)}"
    return reference.tree_visibility(parents)


__all__ = ["MAX_ROWS", "tree_mask", "tree_visibility"]
