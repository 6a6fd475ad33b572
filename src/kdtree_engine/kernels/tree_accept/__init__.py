"""Operator: the longest path of each draft tree that the target agrees with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import has_kernel, launch_options
from kdtree_engine.kernels.tree_accept import reference


class AcceptedPaths(NamedTuple):
    """R paths. indices: [R, length] int64, tree rows from the root (0) on, rising, padded with -1.

    lengths: [R] int64, rows accepted, root included. next_tokens: [R] int64, the target's token
    after the last accepted row. broken: [R] bool, whether the walk came to a row that could not be
    sampled and ended before it; the root being such a row, no row is accepted and the next token
    means nothing.
    """

    indices: Tensor
    lengths: Tensor
    next_tokens: Tensor
    broken: Tensor


def tree_accept(
    tokens: Tensor, parents: Tensor, picks: Tensor, length: int, finite: Tensor | None = None
) -> AcceptedPaths:
    """Walk R trees: from a row to its child whose token the target picked there, until none is.

    tokens, parents: [R, N] int64 as tree_build makes them (a padding row has parent -1 and is
    never reached). picks: [R, N] int64, the target's token after each row. length: the deepest
    tree's depth plus 1. Of two children with one token the first counts. finite: [R, N] bool,
    False where a row could not be sampled; all are good where it is left out.
    """
    assert tokens.shape == parents.shape == picks.shape and tokens.ndim == 2, (
        f"tokens {list(tokens.shape)}, parents {list(parents.shape)}, picks {list(picks.shape)}"
    )
    assert tokens.dtype == parents.dtype == picks.dtype == torch.int64
    assert length >= 1
    assert finite is None or (finite.shape == picks.shape and finite.dtype == torch.bool)
    if has_kernel(picks):
        return _launch_accept(tokens, parents, picks, length, finite)
    return AcceptedPaths(*reference.tree_accept(tokens, parents, picks, length, finite))


def _launch_accept(
    tokens: Tensor, parents: Tensor, picks: Tensor, length: int, finite: Tensor | None = None
) -> AcceptedPaths:
    from triton import next_power_of_2

    from kdtree_engine.kernels.tree_accept.kernel import accept_kernel

    requests, rows = picks.shape

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(requests, *shape, dtype=dtype, device=picks.device)

    out = AcceptedPaths(empty(length), empty(), empty(), empty(dtype=torch.bool))
    if requests:
        accept_kernel[(requests,)](
            tokens.contiguous(),
            parents.contiguous(),
            picks.contiguous(),
            None if finite is None else finite.contiguous(),
            *out,
            rows,
            length,
            NP=next_power_of_2(rows),
            LP=next_power_of_2(length),
            num_warps=1,
            **launch_options(picks),
        )
    return out


__all__ = ["AcceptedPaths", "tree_accept"]
