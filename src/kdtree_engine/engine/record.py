"""What a step tells the host about each request: one row of int64, so that one copy brings it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.tree_build import BuiltTrees
from kdtree_engine.types import DraftTree

_NUMBERS = 3  # the fields before the lists: length, broken, nodes


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
    """A step of one request on the host: its path, and the tree."""

    indices: list[int]
    emitted: list[int]
    broken: bool
    tree: DraftTree


def width(rows: int, length: int) -> int:
    """Elements of a record of a tree of `rows` rows and paths of at most `length`."""
    return _NUMBERS + 2 * length + 4 * rows


def pack(trees: BuiltTrees, walk: Walk) -> Tensor:
    """[B, width] int64."""
    return torch.cat(
        (
            walk.lengths[:, None],
            walk.broken[:, None].long(),
            trees.nodes[:, None],
            walk.indices,
            walk.emitted,
            trees.tokens,
            trees.parents,
            trees.depths,
            trees.scores.view(torch.int64),
        ),
        1,
    )


def unpack(record: Tensor, rows: int) -> list[Record]:
    """The records of [B, width] on the host."""
    length = (record.shape[1] - width(rows, 0)) // 2
    found = []
    for row, head in zip(record, record[:, : _NUMBERS + 2 * length].tolist(), strict=True):
        count, broken, nodes = head[:_NUMBERS]
        tree = [part[: nodes + 1] for part in row[_NUMBERS + 2 * length :].view(4, rows)]
        found.append(
            Record(
                head[_NUMBERS : _NUMBERS + count],
                head[_NUMBERS + length : _NUMBERS + length + count],
                bool(broken),
                DraftTree(tree[0], tree[1], tree[2], tree[3].view(torch.float64)),
            )
        )
    return found
