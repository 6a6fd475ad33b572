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
