"""Operator: draft trees of at most `budget` nodes from per-depth candidates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.gumbel import NoiseBounds, NoiseWanted, noise_bounds
from kdtree_engine.kernels.launch import has_kernel, launch_options, multiprocessors
from kdtree_engine.kernels.tree_build import reference
from kdtree_engine.kernels.tree_mask import MAX_ROWS, tree_mask

MAX_DEPTHS = 64
MAX_RANKS = 64

HELPERS = 3
"""Warps a multiprocessor that draw noise beside one tree: with the tree's, one a scheduler."""

MOST_HELPERS = 12


class BuiltTrees(NamedTuple):
    """R trees, padded to budget + 1 rows; row 0 of each is the root.

    tokens, parents, depths: [R, budget+1] int64. scores: [R, budget+1] float64. nodes: [R] int64,
    the number of nodes besides the root. A padding row has token -1, parent -1, depth 0 and score
    -inf; the root has token -1, parent -1, depth 0 and score 0.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    nodes: Tensor


class TreePlaces(NamedTuple):
    """Where R trees stand. roots: [R] int64, the root's token. contexts: [R] int32, the root's
    position. scratch: [R] int64, the slot of row 0; row i has slot scratch + i.
    """

    roots: Tensor
    contexts: Tensor
    scratch: Tensor


class TreeRows(NamedTuple):
    """What the target's forward reads of each row, [R, N] int64.

    tokens: the root's in row 0, 0 in padding rows. positions: context + depth, at most
    max_positions - 1. slots: where the row's latents go until the walk.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor


class PlannedTrees(NamedTuple):
    """Trees, their ancestor bits [R, N] int64 (as in kernels/tree_mask), their rows, and bounds of
    the noise of the tokens after the contexts: where wanted, and where operators run as kernels.
    """

    trees: BuiltTrees
    ancestors: Tensor
    rows: TreeRows
    noise: NoiseBounds | None


def tree_build(
    log_probs: Tensor,
    tokens: Tensor,
    budget: int,
    depth_limit: Tensor | None = None,
    node_limit: Tensor | None = None,
    chain: bool = False,
) -> BuiltTrees:
    """Build R trees from log_probs [R, H, K] (float32) and tokens [R, H, K] (int64).

    H, K and the budget may be 0. Rows are made best first: falling score, equal scores by the
    smaller tuple of ranks. Non-finite candidates are dropped. depth_limit [R] int64: no node of a
    request is deeper. node_limit [R] int64: it has no more nodes. chain: the likeliest candidate
    of each depth alone, so that a tree is one path.

    On a CUDA device budgets over 63, H or K over 64 and dtypes other than float32 fall back to the
    reference, which waits for the device.
    """
    _check(log_probs, tokens, budget, depth_limit, node_limit)
    if has_kernel(log_probs) and _fits(log_probs, budget):
        return _launch_tree(log_probs, tokens, budget, depth_limit, node_limit, chain)[0]
    built = reference.tree_build(log_probs, tokens, budget, depth_limit, node_limit, chain)
    return BuiltTrees(*built)


def plan_trees(
    log_probs: Tensor,
    tokens: Tensor,
    budget: int,
    places: TreePlaces,
    max_positions: int,
    depth_limit: Tensor | None = None,
    node_limit: Tensor | None = None,
    chain: bool = False,
    noise: NoiseWanted | None = None,
) -> PlannedTrees:
    """tree_build, tree_mask, the step's rows and noise_bounds at once, budget <= 63; one launch on
    CUDA: a tree keeps one warp busy, and the noise the rest of the device.
    """
    _check(log_probs, tokens, budget, depth_limit, node_limit)
    assert budget < MAX_ROWS, f"a budget of {budget} nodes does not fit in a 64-bit word"
    requests = len(log_probs)
    for value, dtype in zip(places, (torch.int64, torch.int32, torch.int64), strict=True):
        assert value.shape == (requests,) and value.dtype == dtype, f"{value.shape} {value.dtype}"
    if has_kernel(log_probs) and _fits(log_probs, budget):
        trees, ancestors, rows, bounds = _launch_tree(
            log_probs, tokens, budget, depth_limit, node_limit, chain, places, max_positions, noise
        )
        assert rows is not None
        return PlannedTrees(trees, ancestors, rows, bounds)
    trees = tree_build(log_probs, tokens, budget, depth_limit, node_limit, chain)
    rows = TreeRows(*reference.tree_rows(trees.tokens, trees.depths, *places, max_positions))
    bounds = None if noise is None else noise_bounds(noise, places.contexts)
    return PlannedTrees(trees, tree_mask(trees.parents), rows, bounds)


def _check(
    log_probs: Tensor,
    tokens: Tensor,
    budget: int,
    depth_limit: Tensor | None,
    node_limit: Tensor | None,
) -> None:
    assert log_probs.ndim == 3, f"log_probs must be [R, H, K], not {list(log_probs.shape)}"
    assert log_probs.shape == tokens.shape, f"{list(log_probs.shape)} and {list(tokens.shape)}"
    assert log_probs.is_floating_point() and tokens.dtype == torch.int64
    assert budget >= 0, f"a budget of {budget} nodes"
    for limit in (depth_limit, node_limit):
        if limit is not None:
            assert limit.shape == log_probs.shape[:1] and limit.dtype == torch.int64


def _fits(log_probs: Tensor, budget: int) -> bool:
    _, depths, ranks = log_probs.shape
    fits = budget < MAX_ROWS and depths <= MAX_DEPTHS and ranks <= MAX_RANKS
    return fits and log_probs.dtype == torch.float32


def _bounds(noise: NoiseWanted, places: TreePlaces) -> tuple[NoiseBounds, tuple[Any, ...]]:
    """Bounds to be filled, and the kernel's arguments that say so."""
    requests, sizes = len(places.contexts), (noise.depths, noise.vocab)
    given = noise.seeds.contiguous(), noise.temperature.contiguous()
    values = torch.empty(requests, *sizes, dtype=torch.float16, device=noise.seeds.device)
    return NoiseBounds(values, places.contexts), (*given, values, requests, *sizes)


def _launch_tree(
    log_probs: Tensor,
    tokens: Tensor,
    budget: int,
    depth_limit: Tensor | None = None,
    node_limit: Tensor | None = None,
    chain: bool = False,
    places: TreePlaces | None = None,
    max_positions: int = 1,
    noise: NoiseWanted | None = None,
    helpers: int = HELPERS,
) -> tuple[BuiltTrees, Tensor, TreeRows | None, NoiseBounds | None]:
    """The operator by one kernel. helpers: programs a multiprocessor that draw noise, a tree."""
    from triton import next_power_of_2

    from kdtree_engine.kernels.tree_build.kernel import tree_kernel

    requests, depths, ranks = log_probs.shape
    log_probs, tokens = log_probs.contiguous(), tokens.contiguous()

    def empty(dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(requests, budget + 1, dtype=dtype, device=tokens.device)

    nodes = torch.empty(requests, dtype=torch.int64, device=tokens.device)
    trees = BuiltTrees(empty(), empty(), empty(), empty(torch.float64), nodes)
    ancestors = empty()
    rows = None if places is None else TreeRows(empty(), empty(), empty())
    bounds, helping = None, 0
    drawn: tuple[Any, ...] = (None, None, None, requests, 0, 0)
    if noise is not None:
        assert places is not None
        bounds, drawn = _bounds(noise, places)
        helping = multiprocessors(tokens.device) * min(helpers * requests, MOST_HELPERS)
    if requests:
        tree_kernel[(requests + helping,)](
            log_probs,
            tokens,
            torch.empty_like(log_probs),
            torch.empty_like(tokens),
            depth_limit,
            node_limit,
            *trees,
            ancestors,
            *(places or (None, None, None)),
            *(rows or (None, None, None)),
            *drawn,
            depths,
            ranks,
            min(ranks, budget, 1 if chain else budget),
            budget,
            max_positions - 1,
            HP=next_power_of_2(max(depths, 1)),
            KP=next_power_of_2(max(ranks, 1)),
            NP=next_power_of_2(budget + 1),
            BLOCK=128,
            FAST=tokens.device.type != "cpu",
            num_warps=1,
            **launch_options(tokens),
        )
    return trees, ancestors, rows, bounds


__all__ = ["BuiltTrees", "PlannedTrees", "TreePlaces", "TreeRows", "plan_trees", "tree_build"]
