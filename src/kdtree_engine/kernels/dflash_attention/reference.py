"""Grouped-query attention of block rows over [context ; block].

The drafter never decides what is emitted, so nothing here has to be the same bits from step to
step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def dflash_attention(
    query: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """[B, L, heads, hd] for query [B, L, heads, hd], rotated and normed. Scale hd^-0.5.

    context: keys and values [B, S, kv_heads, hd]; block: keys and values [B, L, kv_heads, hd].
    mask [B, L, S + L] bool, True where a row sees a column; every row sees at least itself. What is
    masked must be finite.
    """
    groups = query.shape[2] // block[0].shape[2]
    joined = []
    for past, own in zip(context, block, strict=True):
        full = torch.cat((past.to(own.dtype), own), 1)  # [B, S + L, kv_heads, hd]
        joined.append(full.transpose(1, 2).repeat_interleave(groups, 1))
    out = scaled_dot_product_attention(
        query.transpose(1, 2), joined[0], joined[1], attn_mask=mask.unsqueeze(1)
    )
    return out.transpose(1, 2)


def dflash_attention_paged(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    draft_layer: Tensor,
    contexts: Tensor,
    pages: Tensor,
    window: int | None,
    sliding: int | None,
    causal: bool = False,
) -> Tensor:
    """The operator `dflash_attention_paged` of this folder, gathered page by page.

    What no row sees is replaced by zeros, so memory that nobody has written may hold anything. On a
    CPU only the tokens from the first to the last visible one are gathered.
    """
    length, page_size = query.shape[1], draft_layer.shape[1]
    first, last = 0, pages.shape[1] * page_size
    if query.device.type == "cpu":
        last = int(contexts.max())
        reach = [last, last if window is None else window, last if sliding is None else sliding - 1]
        first = max(0, int(contexts.min()) - min(reach))
    at = torch.arange(first, last, device=query.device)  # [S]
    slots = pages.index_select(1, at // page_size).long() * page_size + at % page_size  # [B, S]
    rows = torch.unflatten(draft_layer.flatten(0, 1)[slots.flatten()], 0, slots.shape)
    mask = _visible(at, contexts, length, window, sliding, causal)
    seen = mask[:, :, : at.numel()].any(1)  # [B, S]
    rows = torch.where(seen[:, :, None, None, None], rows, 0)  # [B, S, 2, kv_heads, hd]
    return dflash_attention(query, (rows[:, :, 0], rows[:, :, 1]), own, mask)


def _visible(
    at: Tensor,
    contexts: Tensor,
    length: int,
    window: int | None,
    sliding: int | None,
    causal: bool,
) -> Tensor:
    """[B, L, S + L] bool for context positions at [S]; DFlashModel's rules."""
    anchors = contexts.long()[:, None, None]  # [B, 1, 1]
    offsets = torch.arange(length, device=at.device)
    rows = anchors + offsets[:, None]  # [B, L, 1]
    context = (at < anchors).expand(-1, length, -1)
    distance = offsets[:, None] - offsets
    own = distance >= (0 if causal else -length)
    if window is not None:
        context = context & (at >= anchors - window)
    if sliding is not None:
        own = own & (distance.abs() < sliding)
        context = context & (rows - at < sliding)
    return torch.cat((context, own.expand(len(contexts), -1, -1)), 2)
