"""What a step tells the host about each request: one row of int64, so that one copy brings it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.engine.request import TokenLogProb
from kdtree_engine.kernels.top_k import LOG_PROBS, TokenLogProbs
from kdtree_engine.kernels.tree_build import BuiltTrees
from kdtree_engine.types import DraftTree

_NUMBERS = 3  # the fields before the lists: length, broken, nodes
_MOST_LOG_PROBS = 1 + 2 * LOG_PROBS  # numbers a row: the pick's, the likeliest ones', their tokens


@dataclass(frozen=True, eq=False)
class Walk:
    """The paths of B trees. L is the length of the longest path that there could be.

    indices: [B, L] int64, rows of the tree from the root on, then -1. lengths: [B]
    int64, rows accepted and tokens emitted; 0 for a request that had ended. emitted: [B, L] int64,
    the picks of those rows: the drafts accepted, then the target's own. roots: [B] int64, the last
    token emitted, if there is one. broken: [B] bool, whether the path ended before logits that are
    not finite.
    """

    indices: Tensor
    lengths: Tensor
    emitted: Tensor
    roots: Tensor
    broken: Tensor


@dataclass(frozen=True, eq=False)
class Record:
    """A step of one request on the host: its path, and the tree. log_probs: of the emitted tokens,
    where the step computed them.
    """

    indices: list[int]
    emitted: list[int]
    broken: bool
    tree: DraftTree
    log_probs: TokenLogProbs | None = None


def width(rows: int, length: int, log_probs: bool) -> int:
    """Elements of a record of a tree of `rows` rows and paths of at most `length`."""
    return _NUMBERS + 2 * length + 4 * rows + length * _MOST_LOG_PROBS * log_probs


def pack(trees: BuiltTrees, walk: Walk, log_probs: TokenLogProbs | None = None) -> Tensor:
    """[B, width] int64. log_probs: of the B * L emitted tokens."""
    parts = [
        walk.lengths[:, None],
        walk.broken[:, None].long(),
        trees.nodes[:, None],
        walk.indices,
        walk.emitted,
        trees.tokens,
        trees.parents,
        trees.depths,
        trees.scores.view(torch.int64),
    ]
    if log_probs is not None:
        values = torch.cat((log_probs.chosen[:, None], log_probs.values), 1)
        numbers = torch.cat((values.view(torch.int32).long(), log_probs.tokens), 1)
        parts.append(numbers.view(len(walk.lengths), -1))
    return torch.cat(parts, 1)


def unpack(record: Tensor, rows: int, length: int) -> list[Record]:
    """The records of [B, width] on the host, of trees of `rows` rows and paths of `length`."""
    lists, trees = _NUMBERS + 2 * length, width(rows, length, False)
    found = []
    for row, head in zip(record, record[:, :lists].tolist(), strict=True):
        count, broken, nodes = head[:_NUMBERS]
        tree = [part[: nodes + 1] for part in row[lists:trees].view(4, rows)]
        found.append(
            Record(
                head[_NUMBERS : _NUMBERS + count],
                head[_NUMBERS + length : _NUMBERS + length + count],
                bool(broken),
                DraftTree(tree[0], tree[1], tree[2], tree[3].view(torch.float64)),
                _log_probs(row[trees:].view(length, -1)[:count]) if len(row) > trees else None,
            )
        )
    return found


def _log_probs(numbers: Tensor) -> TokenLogProbs:
    """The first `count` rows of what `pack` appended, [count, 1 + 2 k] int64."""
    kept = numbers.shape[1] // 2
    values = numbers[:, : 1 + kept].int().view(torch.float32)
    return TokenLogProbs(values[:, 0], values[:, 1:], numbers[:, 1 + kept :])


def told(found: TokenLogProbs, tokens: Sequence[int], wanted: int) -> list[TokenLogProb]:
    """What a user is told of `tokens`, the first of those in `found`: each one's log-probability
    and the `wanted` likeliest.
    """
    chosen, values, ids = (part[: len(tokens)].tolist() for part in found)
    return [
        TokenLogProb(token, own, tuple(zip(top[:wanted], most[:wanted], strict=True)))
        for token, own, top, most in zip(tokens, chosen, ids, values, strict=True)
    ]
