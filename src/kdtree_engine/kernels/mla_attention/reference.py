"""softmax(q . k * scale) v with one order of summation, set by the keys' positions alone.

Per row: scores of all its keys; their maximum m (exact in any order); in each tile of 64 keys the
sums of exp(s - m) and of exp(s - m) v, one product; then tiles are added in order inside blocks of
8 tiles (512 keys, absolute borders), and blocks in order. A masked key has weight exactly 0 and a
tile of masked keys adds exactly 0, so neither the length of the run nor the rows beside it matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.matmul import row_bmm
from kdtree_engine.kernels.mla_attention.plan import TILE, AttentionPlan, SpanPlan

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
    rows = query[span.first : span.first + span.count].float() * scale
    shared = flat.index_select(0, span.shared).float().view(-1, TILE, flat.shape[1])
    step = max(1, _MOST_SCORES // (rows.shape[1] * max(1, span.shared.shape[0])))
    parts = []
    for first in range(0, span.count, step):
        cut = slice(first, first + step)
        tiles = [_shared_tiles(rows[cut], shared, span.shared_mask, cut)] if len(shared) else []
        if span.tail is not None and span.tail_mask is not None:
            tiles.append(_tail_tiles(rows[cut], flat, span.tail[cut], span.tail_mask[cut]))
        parts.append(_softmax_values(tiles, value_dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Scores [T, n, heads, 64] of n rows and their keys, as one product took them.

    `keys` is [products, 64, D] and `flat_scores` [products, M, 64]: T products of n * heads rows
    where tiles are shared, n * T products of heads rows where every row has its own.
    """

    flat_scores: Tensor
    keys: Tensor
    rows: int
    private: bool

    def by_tile(self, x: Tensor) -> Tensor:
        """[products, M, ...] as [T, n, heads, ...]."""
        if not self.private:
            return x.view(x.shape[0], self.rows, -1, *x.shape[2:])
        return x.view(self.rows, -1, *x.shape[1:]).transpose(0, 1)

    def by_product(self, x: Tensor) -> Tensor:
        """[1, n, heads] broadcast over tiles, as [products, M]: undoes `by_tile`."""
        if not self.private:
            return x.reshape(1, -1)
        tiles = self.keys.shape[0] // self.rows
        return x.transpose(0, 1).expand(-1, tiles, -1).reshape(-1, x.shape[2])


def _shared_tiles(query: Tensor, keys: Tensor, mask: Tensor | None, cut: slice) -> _Tiles:
    """Scores of query [n, heads, D] on keys [T, 64, D] that all rows read."""
    count, heads, dim = query.shape
    scores = row_bmm(query.reshape(1, -1, dim).expand(len(keys), -1, -1), keys.transpose(1, 2))
    if mask is not None:
        tiled = mask[cut].view(count, -1, TILE).transpose(0, 1).unsqueeze(2)  # [T, n, 1, 64]
        scores = scores.view(-1, count, heads, TILE).masked_fill(~tiled, -torch.inf)
        scores = scores.view(len(keys), -1, TILE)
    return _Tiles(scores, keys, count, private=False)


def _tail_tiles(query: Tensor, flat: Tensor, tail: Tensor, mask: Tensor) -> _Tiles:
    """Scores of query [n, heads, D] on each row's own keys, slots tail [n, T * 64]."""
    count, heads, dim = query.shape
    keys = flat.index_select(0, tail.flatten()).float().view(-1, TILE, dim)  # [n * T, 64, D]
    spread = query.unsqueeze(1).expand(-1, len(keys) // count, -1, -1).reshape(-1, heads, dim)
    scores = row_bmm(spread, keys.transpose(1, 2)).masked_fill(~mask.view(-1, 1, TILE), -torch.inf)
    return _Tiles(scores, keys, count, private=True)


def _softmax_values(tiles: list[_Tiles], value_dim: int) -> Tensor:
    """[n, heads, value_dim]: exp(s - m) v over exp(s - m), tiles added in order."""
    highest = tiles[0].by_tile(tiles[0].flat_scores.amax(-1)).amax(0, keepdim=True)  # [1, n, heads]
    for more in tiles[1:]:
        own = more.by_tile(more.flat_scores.amax(-1)).amax(0, keepdim=True)
        highest = torch.maximum(highest, own)
    sums = []
    for part in tiles:
        weights = torch.exp(part.flat_scores - part.by_product(highest).unsqueeze(-1))
        values = row_bmm(weights, part.keys[..., :value_dim])
        mass = weights.sum(-1, keepdim=True)
        sums.append(part.by_tile(torch.cat((values, mass), -1)))
    total = fold_tiles(sums[0] if len(sums) == 1 else torch.cat(sums))
    return total[..., :value_dim] / total[..., value_dim:]


def fold_tiles(sums: Tensor) -> Tensor:
    """Add per-tile sums [T, ...] in order inside blocks of 8 tiles, then the blocks in order."""
    whole = sums.shape[0] // BLOCK_TILES * BLOCK_TILES
    blocks: list[Tensor] = []
    if whole:
        grouped = sums[:whole].view(-1, BLOCK_TILES, *sums.shape[1:])
        block = grouped[:, 0]
        for tile in range(1, BLOCK_TILES):
            block = block + grouped[:, tile]
        blocks.extend(block.unbind(0))
    if whole < sums.shape[0]:
        block = sums[whole]
        for tile in range(whole + 1, sums.shape[0]):
            block = block + sums[tile]
        blocks.append(block)
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total
