"""The draft tree by enumeration: list every candidate prefix, sort, take the best.

No heap and no incremental frontier. A prefix is its tuple of ranks: (0, 2) is the best token of
depth 1, then the third-best of depth 2. Letters: H depths, K candidates a depth, n nodes besides
the root.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Ranks = tuple[int, ...]


class Tree(NamedTuple):
    """Row 0 is the root: token -1, parent -1, depth 0, score 0.0, ranks ()."""

    tokens: Array  # int64 [n + 1]
    parents: Array  # int64 [n + 1]
    depths: Array  # int64 [n + 1]
    scores: Array  # float64 [n + 1], natural log of the path's probability under the drafter
    ranks: list[Ranks]
    visibility: Array  # bool [n + 1, n + 1]: row i sees itself and its ancestors


def better_or_equal_prefixes(ranks: Ranks) -> int:
    """How many prefixes, itself included, cannot come after this one whatever the numbers are.

    They are the non-empty prefixes of every tuple that is nowhere greater than `ranks`.
    """
    return sum(math.prod(r + 1 for r in ranks[: d + 1]) for d in range(len(ranks)))


def candidates(widths: Sequence[int], limit: int, prefix: Ranks = ()) -> Iterator[Ranks]:
    """All tuples of ranks that could be among the best `limit`; widths: candidates per depth."""
    if len(prefix) == len(widths):
        return
    for rank in range(widths[len(prefix)]):
        ranks = (*prefix, rank)
        if better_or_equal_prefixes(ranks) > limit:
            return  # every further sibling is dominated by still more
        yield ranks
        yield from candidates(widths, limit, ranks)


def path_score(rows: Sequence[Sequence[float]], ranks: Ranks) -> float:
    """The path's sum, in doubles, in the published order of operations.

    A child starts at its parent's score plus the best candidate of its depth; a sibling is
    (the one before it) - (that one's own term) + (its term). Sorting by it equals popping a heap
    as long as rounding never makes a sibling better than the one before it; random rows full of
    ties, over ten orders of magnitude, gave no such case.
    """
    score = 0.0
    for row, rank in zip(rows, ranks, strict=False):
        score += row[0]
        for r in range(rank):
            score = score - row[r] + row[r + 1]
    return score


def visibility(parents: Array) -> Array:
    """parents [n + 1], root first with -1 -> bool [n + 1, n + 1]."""
    seen = np.zeros((len(parents), len(parents)), dtype=bool)
    for node in range(len(parents)):
        ancestor = node
        while ancestor != -1:
            seen[node, ancestor] = True
            ancestor = int(parents[ancestor])
    return seen


def finite_rows(log_probs: Array, tokens: Array) -> tuple[list[list[float]], list[list[int]]]:
    """Drop candidates that are not finite; a depth without any ends the tree."""
    rows: list[list[float]] = []
    names: list[list[int]] = []
    for values, ids in zip(log_probs.astype(np.float32), tokens, strict=True):
        keep = np.isfinite(values)
        if not keep.any():
            break
        rows.append([float(v) for v in values[keep]])
        names.append([int(t) for t in ids[keep]])
    return rows, names


def build(log_probs: Array, tokens: Array, budget: int) -> Tree:
    """float32 log_probs [H, K], each row falling, tokens [H, K] -> the `budget` best prefixes.

    Higher score first; of equal scores the smaller tuple of ranks.
    """
    rows, names = finite_rows(np.asarray(log_probs), np.asarray(tokens))
    scored = [(-path_score(rows, c), c) for c in candidates([len(r) for r in rows], budget)]
    chosen = sorted(scored)[: max(budget, 0)]
    index: dict[Ranks, int] = {(): 0}
    index.update({ranks: i + 1 for i, (_, ranks) in enumerate(chosen)})
    parents = np.array([-1] + [index[ranks[:-1]] for _, ranks in chosen], dtype=np.int64)
    return Tree(
        tokens=np.array([-1] + [names[len(r) - 1][r[-1]] for _, r in chosen], dtype=np.int64),
        parents=parents,
        depths=np.array([0] + [len(r) for _, r in chosen], dtype=np.int64),
        scores=np.array([0.0] + [-negative for negative, _ in chosen], dtype=np.float64),
        ranks=[()] + [ranks for _, ranks in chosen],
        visibility=visibility(parents),
    )


def walk(tokens: Array, parents: Array, picks: Array) -> tuple[list[int], int]:
    """The target's choice after each node, [n + 1] -> accepted nodes (root included), next token.

    By definition rather than by descent: a node is accepted if each step of its path is what the
    target chose at the step before; the deepest accepted node ends the path.
    """

    def path(node: int) -> list[int]:
        return [] if node == -1 else [*path(int(parents[node])), node]

    def agreed(nodes: list[int]) -> bool:
        return all(int(picks[a]) == int(tokens[b]) for a, b in itertools.pairwise(nodes))

    accepted = max(filter(agreed, map(path, range(len(parents)))), key=len)
    return accepted, int(picks[accepted[-1]])


def expected_tokens(scores: Array) -> float:
    """1 + the sum of the nodes' path probabilities; scores [n + 1], the root's 0.0 first."""
    return float(np.exp(scores).sum())


def positions(depths: Array, start: int) -> Array:
    """Siblings share a position: start + depth."""
    return start + np.asarray(depths, dtype=np.int64)
