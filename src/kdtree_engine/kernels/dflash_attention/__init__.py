"""Attention of draft blocks over their request's context and over themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.kernels.dflash_attention import reference
from kdtree_engine.kernels.dflash_attention.reference import dflash_attention
from kdtree_engine.kernels.launch import has_kernel, launch_options, multiprocessors, precise

__all__ = ["dflash_attention", "dflash_attention_paged"]


@dataclass(frozen=True)
class Tile:
    """Rows (block rows times a KV head's query heads) a program, its warps, its loads in flight."""

    rows: int
    warps: int
    stages: int


def choose_tile(rows: int, dtype: torch.dtype) -> Tile:
    """The tile for `rows` rows that share a KV head, under 100 KB and without spills: 64 rows of
    128 need 255 registers in 4 warps, and float32 is multiplied without tensor cores.
    """
    if dtype == torch.float32:
        return Tile(16, 4, 1)
    width = min(64, _power(rows))
    return Tile(width, 8 if width == 64 else 4, 2)


def choose_splits(programs: int, most_pages: int, device: torch.device) -> int:
    """Splits of the context where one split is `programs` programs: about one wave in all."""
    return max(1, min(multiprocessors(device) // programs, most_pages))


def dflash_attention_paged(
    query: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    draft_layer: Tensor,
    contexts: Tensor,
    pages: Tensor,
    window: int | None = None,
    sliding: int | None = None,
    causal: bool = False,
) -> Tensor:
    """[B, L, heads, hd] for query [B, L, heads, hd], rotated and normed. Scale hd^-0.5.

    own_keys, own_values [B, L, kv_heads, hd]: the block's. draft_layer [pages, 64, 2, kv_heads,
    hd]: the cache's keys, then values. contexts [B] int32: cached tokens of each request, at slots
    pages[b, c // 64] * 64 + c % 64 with pages [B, P] int32. Row j stands at position contexts[b] +
    j. It sees the context and its whole block, or with `causal` the block's rows up to itself; of
    the context the last `window` tokens where given; with `sliding`, nothing that is `sliding` or
    more positions away, on either side. Cache memory that no row sees may hold anything.
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = own_keys.shape[2]
    assert heads % kv_heads == 0 and own_keys.shape == own_values.shape
    assert own_keys.shape == (batch, length, kv_heads, head_dim)
    assert draft_layer.shape[1:] == (PAGE_SIZE, 2, kv_heads, head_dim)
    assert contexts.shape == (batch,) and pages.shape[:1] == (batch,)
    assert window is None or window > 0
    assert sliding is None or sliding > 0
    if not has_kernel(query):
        own = (own_keys, own_values)
        return reference.dflash_attention_paged(
            query, own, draft_layer, contexts, pages, window, sliding, causal
        )
    limits = window, sliding
    return _launch(query, own_keys, own_values, draft_layer, contexts, pages, limits, causal=causal)


def _launch(
    query: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    draft_layer: Tensor,
    contexts: Tensor,
    pages: Tensor,
    limits: tuple[int | None, int | None],
    tile: Tile | None = None,
    splits: int | None = None,
    causal: bool = False,
) -> Tensor:
    """Both kernels; `limits` are the draft window and the sliding window."""
    from kdtree_engine.kernels.dflash_attention.kernel import draft_combine, draft_partials

    batch, length, heads, head_dim = query.shape
    kv_heads = own_keys.shape[2]
    rows = length * (heads // kv_heads)
    assert query.dtype == own_keys.dtype == own_values.dtype == draft_layer.dtype
    assert contexts.dtype == pages.dtype == torch.int32 and pages.stride(1) == 1
    assert draft_layer.is_contiguous()
    tile = tile or choose_tile(rows, query.dtype)
    tiles = -(-rows // tile.rows)
    if splits is None:
        seen = [limit for limit in limits if limit is not None]
        most = min([pages.shape[1], *(limit // PAGE_SIZE + 1 for limit in seen)])
        splits = choose_splits(batch * kv_heads * tiles, most, query.device)
    shape = (batch, kv_heads, splits, rows)
    sums = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
    tops, totals = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sizes = {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "LENGTH": length,
        "HEAD_DIM": head_dim,
        "WIDTH": _power(head_dim),
        "SPLITS": splits,
        "WINDOW": limits[0] or 0,
        "SLIDING": limits[1] or 0,
        **launch_options(query),
    }
    strides = (_row_stride(query), _row_stride(own_keys), _row_stride(own_values))
    draft_partials[(splits, kv_heads * tiles, batch)](
        query, own_keys, own_values, draft_layer, contexts, pages, sums, tops, totals,
        *strides, pages.stride(0), math.log2(math.e) / math.sqrt(head_dim),
        OWN=_power(length), ROWS=tile.rows, TILES=tiles, STAGES=tile.stages,
        CAUSAL=causal, PRECISE=precise(query), num_warps=tile.warps, **sizes,
    )  # fmt: skip
    chunk = min(32, 1 << (splits - 1).bit_length())
    draft_combine[(rows, kv_heads, batch)](
        sums, tops, totals, contexts, out, CHUNK=chunk, num_warps=4, **sizes
    )
    return out


def _power(size: int) -> int:
    """The least power of two that holds `size` and that an MMA takes."""
    return max(16, 1 << (size - 1).bit_length())


def _row_stride(x: Tensor) -> int:
    """Elements from one row of x [B, L, n, hd] to the next; rows are dense inside and evenly
    spaced.
    """
    assert x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3])
    if x.shape[1] == 1:
        return x.stride(0)
    assert x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x.stride(1)
