"""The walk down a draft tree along the target's own tokens, on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def walk(tokens: list[int], parents: list[int], picks: list[int]) -> tuple[list[int], int]:
    """Rows accepted, root first, and the target's token after the last of them."""
    children: dict[tuple[int, int], int] = {}
    for row, edge in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault(edge, row)
    path = [0]
    while (child := children.get((path[-1], picks[path[-1]]))) is not None:
        path.append(child)
    return path, picks[path[-1]]


def tree_accept(
    tokens: Tensor, parents: Tensor, picks: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator. tokens, parents, picks [R, N] int64."""
    rows = zip(tokens.tolist(), parents.tolist(), picks.tolist(), strict=True)
    walks = [walk(*row) for row in rows]
    assert all(len(path) <= length for path, _ in walks), f"a path of more than {length} rows"
    flat = [row for path, _ in walks for row in path + [-1] * (length - len(path))]
    device = picks.device
    indices = torch.tensor(flat, dtype=torch.int64, device=device).view(len(walks), length)
    lengths = torch.tensor([len(path) for path, _ in walks], dtype=torch.int64, device=device)
    following = torch.tensor([token for _, token in walks], dtype=torch.int64, device=device)
    return indices, lengths, following
