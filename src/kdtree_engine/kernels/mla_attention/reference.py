"""softmax(q . k * scale) v with one order of summation, set by the keys' positions alone.

Per row: scores of all its keys; their maximum m (exact in any order); in each tile of 64 keys the
sums of exp(s - m) and of exp(s - m) v, one product; then tiles are added in order inside blocks of
8 tiles (512 keys, absolute borders), and blocks in order. A masked key has weight exactly 0 and a
tile of masked keys adds exactly 0, so neither the length of the run nor the rows beside it matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.matmul import row_bmm
from kdtree_engine.kernels.mla_attention.plan import TILE, AttentionPlan, SpanPlan
from kdtree_engine.kernels.scalar import scalar

BLOCK_TILES = 8
_MOST_SCORES = 1 << 23  # float32 scores of one pass: bounds memory, cuts rows only


def mla_attention(
    query: Tensor, latents: Tensor, plan: AttentionPlan, scale: float, value_dim: int
) -> Tensor:
    """Attention output in latent space, [R, heads, value_dim], in the query's dtype.

    query [R, heads, D]: absorbed, rotated. latents [pages, 64, D]: one layer of the cache, the
    step's own rows already written. Rows of padding get a copy of the last row's result.
    """
    flat = latents.view(-1, latents.shape[-1])
    parts = [_span(query, flat, span, scale, value_dim) for span in plan.spans]
    covered = sum(span.count for span in plan.spans)
    if covered < plan.rows:
        parts.append(parts[-1][-1:].expand(plan.rows - covered, -1, -1))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.to(query.dtype)


def _span(query: Tensor, flat: Tensor, span: SpanPlan, scale: float, value_dim: int) -> Tensor:
    """All rows of one request, as many at a time as memory allows."""
    rows = query[span.first : span.first + span.count].float() * scalar(scale)
    shared = flat.index_select(0, span.shared).float().view(-1, TILE, flat.shape[1])
    most = max(1, _MOST_SCORES // (rows.shape[1] * max(1, span.shared.shape[0])))
    parts = []
    for first in range(0, span.count, most):
        cut = span if span.count <= most else span.rows(first, min(first + most, span.count))
        own = rows if cut is span else rows[first : first + cut.count]
        tiles = []
        if shared.shape[0]:
            tiles.append(_shared_tiles(own, shared, cut.shared_hidden))
        if cut.tail is not None and cut.tail_hidden is not None:
            tiles.append(_tail_tiles(own, flat, cut.tail, cut.tail_hidden))
        parts.append(_softmax_values(tiles, value_dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Scores of n rows, [T, n, heads, 64], or [n, T, heads, 64] where every row has its own keys.

    keys [products, 64, D], one product a tile, or one a row and tile.
    """

    scores: Tensor
    keys: Tensor
    private: bool

    def highest(self) -> Tensor:
        """Each row's largest score, [1, n, heads, 1]; exact in any order."""
        if self.private:
            return self.scores.amax((1, 3), keepdim=True).transpose(0, 1)
        return self.scores.amax((0, 3), keepdim=True)

    def sums(self, highest: Tensor, value_dim: int) -> Tensor:
        """Per tile, sums of exp(s - m) v and of exp(s - m): [T, n, heads, value_dim + 1]."""
        shift = highest.transpose(0, 1) if self.private else highest
        weights = torch.exp(self.scores - shift)
        values = row_bmm(weights.view(self.keys.shape[0], -1, TILE), self.keys[..., :value_dim])
        values = values.view(*weights.shape[:3], value_dim)
        both = torch.cat((values, weights.sum(-1, keepdim=True)), -1)
        return both.transpose(0, 1) if self.private else both


def _shared_tiles(query: Tensor, keys: Tensor, hidden: Tensor | None) -> _Tiles:
    """Scores of query [n, heads, D] on keys [T, 64, D] that all rows read."""
    count, heads, dim = query.shape
    rows = query.reshape(1, -1, dim).expand(keys.shape[0], -1, -1)
    scores = row_bmm(rows, keys.transpose(1, 2)).view(-1, count, heads, TILE)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return _Tiles(scores, keys, private=False)


def _tail_tiles(query: Tensor, flat: Tensor, tail: Tensor, hidden: Tensor) -> _Tiles:
    """Scores of query [n, heads, D] on each row's own keys, slots tail [n, T * 64]."""
    count, heads, dim = query.shape
    keys = flat.index_select(0, tail.flatten()).float().view(-1, TILE, dim)  # [n * T, 64, D]
    tiles = keys.shape[0] // count
    spread = query.unsqueeze(1).expand(-1, tiles, -1, -1).reshape(-1, heads, dim)
    scores = row_bmm(spread, keys.transpose(1, 2)).view(count, tiles, heads, TILE)
    return _Tiles(scores.masked_fill(hidden, -torch.inf), keys, private=True)


def _softmax_values(tiles: list[_Tiles], value_dim: int) -> Tensor:
    """[n, heads, value_dim]: exp(s - m) v over exp(s - m), tiles added in order."""
    highest = tiles[0].highest()
    for more in tiles[1:]:
        highest = torch.maximum(highest, more.highest())
    sums = [part.sums(highest, value_dim) for part in tiles]
    total = fold_tiles(sums[0] if len(sums) == 1 else torch.cat(sums))
    values, mass = torch.split(total, [value_dim, 1], -1)
    return values / mass


def fold_tiles(sums: Tensor) -> Tensor:
    """Add per-tile sums [T, ...] in order inside blocks of 8 tiles, then the blocks in order."""
    whole = sums.shape[0] // BLOCK_TILES * BLOCK_TILES
    blocks: list[Tensor] = []
    if whole:
        grouped = sums[:whole].view(-1, BLOCK_TILES, *sums.shape[1:])
        blocks += _add_in_order(grouped.unbind(1)).unbind(0)
    if whole < sums.shape[0]:
        blocks.append(_add_in_order(sums[whole:].unbind(0)))
    return _add_in_order(blocks)


def _add_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
