"""Launches of the small operators at K2.6's sizes, for tests/compiled.py to record."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels import cache_commit, gumbel, logit_edits, sample, top_k, tree_accept
from kdtree_engine.kernels import tree_build as build
from kdtree_engine.kernels import tree_mask as mask

VOCAB, ROWS, HORIZON = 163_840, 64, 7


def launches(device: str = "meta") -> None:
    """Every kernel of the small operators, with and without its optional inputs."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def column(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return empty(rows, dtype=dtype)

    logits = empty(ROWS, VOCAB, dtype=torch.float32)
    settings = (column(ROWS), empty(ROWS), column(ROWS), column(ROWS), empty(ROWS), empty(ROWS))
    sample._launch_sample(logits, *settings)
    bounds = gumbel._launch_bounds(empty(1), column(1, torch.int32), column(1), HORIZON + 1, VOCAB)
    sample._launch_sample(logits, *settings, bounds)
    gumbel._launch_gumbel(empty(ROWS), empty(ROWS), VOCAB)

    noise = (column(HORIZON), empty(HORIZON), empty(HORIZON))
    for dtype in (torch.float32, torch.bfloat16):
        for k in (63, 1):
            top_k._launch_top(empty(HORIZON, VOCAB, dtype=dtype), k)
            top_k._launch_top(empty(HORIZON, VOCAB, dtype=dtype), k, *noise)
            reduced = empty(HORIZON, 32_000, dtype=dtype)
            top_k._launch_top(reduced, k, *noise, empty(32_000))

    top_k._launch_log_probs(logits, empty(ROWS), top_k.LOG_PROBS)

    state = logit_edits.empty_edits(2, VOCAB, device)
    for rows in (1, 16, ROWS):
        tree = empty(1, rows)
        edited = empty(rows, VOCAB, dtype=torch.float32)
        logit_edits._launch_edits(edited, state, empty(1), tree, tree, tree)
    for length in (1, HORIZON + 1, ROWS):
        logit_edits._launch_remember(state, empty(1), empty(1, length), empty(1))

    places = build.TreePlaces(empty(1), column(1, torch.int32), empty(1))
    for horizon, ranks, budget in ((HORIZON, 63, 63), (1, 1, 1), (0, 0, 0), (64, 64, 63)):
        values = empty(1, horizon, ranks, dtype=torch.float32)
        names = empty(1, horizon, ranks)
        build._launch_tree(values, names, budget)
        build._launch_tree(values, names, budget, empty(1), empty(1), False, places, 1 << 18)
        limits = (None, None, False, places, 1 << 18)
        noise = gumbel.NoiseWanted(empty(1), column(1), HORIZON + 1, VOCAB)
        build._launch_tree(values, names, budget, *limits, noise)

    tree = empty(1, ROWS)
    mask._launch_mask(tree)
    finite = empty(1, ROWS, dtype=torch.bool)
    tree_accept._launch_accept(tree, tree, tree, HORIZON + 1)
    tree_accept._launch_accept(tree, tree, tree, HORIZON + 1, finite)

    layers = [empty(9, 64, 576, dtype=torch.bfloat16)]
    pages = empty(1, 4, dtype=torch.int32)
    for length in (1, HORIZON + 1, ROWS):
        cache_commit._launch_rows(layers, empty(length), empty(length))
        move = (tree, empty(1, length), empty(1), column(1, torch.int32), pages)
        cache_commit._launch_paths(layers, *move)
