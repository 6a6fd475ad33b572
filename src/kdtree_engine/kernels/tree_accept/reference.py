"""The walk down a draft tree along the target's own tokens, on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def walk(
    tokens: list[int], parents: list[int], picks: list[int], finite: list[bool]
) -> tuple[list[int], int, bool]:
    """Rows accepted, root first, the target's token after the last, and whether the walk broke."""
    children: dict[tuple[int, int], int] = {}
    for row, edge in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault(edge, row)
    path: list[int] = []
    here, following = 0, picks[0]
    while finite[here]:
        path.append(here)
        following = picks[here]
        child = children.get((here, following))
        if child is None:
            return path, following, False
        here = child
    return path, following, True


def tree_accept(
    tokens: Tensor, parents: Tensor, picks: Tensor, length: int, finite: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the operator. tokens, parents, picks [R, N] int64, finite [R, N] bool."""
    good = torch.ones_like(picks, dtype=torch.bool) if finite is None else finite
    rows = zip(tokens.tolist(), parents.tolist(), picks.tolist(), good.tolist(), strict=True)
    walks = [walk(*row) for row in rows]
    assert all(len(path) <= length for path, _, _ in walks), f"a path of more than {length} rows"
    flat = [row for path, _, _ in walks for row in path + [-1] * (length - len(path))]
    device = picks.device
    indices = torch.tensor(flat, dtype=torch.int64, device=device).view(len(walks), length)
    lengths = torch.tensor([len(path) for path, _, _ in walks], dtype=torch.int64, device=device)
    following = torch.tensor([token for _, token, _ in walks], dtype=torch.int64, device=device)
    broken = torch.tensor([broke for _, _, broke in walks], dtype=torch.bool, device=device)
    return indices, lengths, following, broken
