"""Best-first construction of draft trees, on the host.

The score of a node is the sum of its path's log-probabilities, in float64 over float32 terms. The
budget's best-scoring prefixes are always closed under taking the parent, so popping a heap yields
them one by one. Algorithm and order of the additions: DDTree (Ringel and Romano, arXiv 2604.12989);
the additions are part of the definition, since their rounding decides near-ties.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

# score, token, parent row, depth of one node
Node = tuple[float, int, int, int]


def candidates(
    log_probs: Tensor, tokens: Tensor, budget: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Rows of usable candidates, likeliest first, from log_probs and tokens [H, K].

    Non-finite candidates are dropped. A row that is not in descending order is sorted, stably, so
    a row that is keeps its own order among equals. No tree of `budget` nodes reaches a rank of
    `budget` or more.
    """
    finite = torch.isfinite(log_probs)
    clean = bool(finite.all())
    if not clean:
        log_probs = torch.where(finite, log_probs, -torch.inf)
    if bool((log_probs[:, 1:] > log_probs[:, :-1]).any()):
        log_probs, order = log_probs.sort(dim=1, descending=True, stable=True)
        tokens = tokens.gather(1, order)
    values: list[list[float]] = log_probs[:, :budget].tolist()
    names: list[list[int]] = tokens[:, :budget].tolist()
    if not clean:
        values = [[value for value in row if value != -torch.inf] for row in values]
    return values, names


def grow(values: list[list[float]], names: list[list[int]], budget: int) -> list[Node]:
    """The nodes of one tree in the order they are made; the root (row 0) is not among them."""
    nodes: list[Node] = []
    # Ordered by falling score, then rising rank tuple. Rank tuples differ, so the comparison never
    # reaches the third field. A tuple sorts after its own prefixes: a parent precedes its child.
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if values and values[0]:
        heap.append((-values[0][0], (0,), 0))
    while heap and len(nodes) < budget:
        negated, ranks, parent = heapq.heappop(heap)
        score, depth, rank = -negated, len(ranks), ranks[-1]
        row = values[depth - 1]
        nodes.append((score, names[depth - 1][rank], parent, depth))
        if rank + 1 < len(row):
            sibling = score - row[rank] + row[rank + 1]
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent))
        if depth < len(values) and values[depth]:
            heapq.heappush(heap, (-(score + values[depth][0]), (*ranks, 0), len(nodes)))
    return nodes


def tree_build(
    log_probs: Tensor,
    tokens: Tensor,
    budget: int,
    depth_limit: Tensor | None = None,
    node_limit: Tensor | None = None,
    chain: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the operator. log_probs, tokens [R, H, K]; results on the device of `tokens`."""
    requests, horizon = log_probs.shape[:2]
    depths = [horizon] * requests if depth_limit is None else depth_limit.tolist()
    sizes_at_most = [budget] * requests if node_limit is None else node_limit.tolist()
    trees = []
    for row, names, depth, most in zip(log_probs, tokens, depths, sizes_at_most, strict=True):
        cut = max(0, depth)
        values, words = candidates(row[:cut], names[:cut], budget)
        if chain:
            values, words = [one[:1] for one in values], [one[:1] for one in words]
        trees.append(grow(values, words, min(budget, most)))
    wide = [[(0.0, -1, -1, 0), *tree] for tree in trees]
    pad = (-torch.inf, -1, -1, 0)
    full = [tree + [pad] * (budget + 1 - len(tree)) for tree in wide]
    device = tokens.device
    shape = (len(full), budget + 1)

    def column(field: int, dtype: torch.dtype) -> Tensor:
        flat = [node[field] for tree in full for node in tree]
        return torch.tensor(flat, dtype=dtype, device=device).view(shape)

    sizes = torch.tensor([len(tree) for tree in trees], dtype=torch.int64, device=device)
    whole = torch.int64
    return column(1, whole), column(2, whole), column(3, whole), column(0, torch.float64), sizes


def tree_rows(
    tokens: Tensor,
    depths: Tensor,
    roots: Tensor,
    contexts: Tensor,
    scratch: Tensor,
    max_positions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and slots [R, N] of the trees' rows; see TreeRows and TreePlaces."""
    wide = torch.where(tokens < 0, 0, tokens)
    wide[:, 0] = roots
    positions = (contexts.to(torch.int64)[:, None] + depths).clamp(max=max_positions - 1)
    row = torch.arange(tokens.shape[1], device=tokens.device)
    return wide, positions, scratch[:, None] + row
