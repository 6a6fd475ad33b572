"""What follows the first product of an attention block: norms, rotation, and the cache rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.rms_norm.reference import rms_norm
from kdtree_engine.kernels.rope import Angles, rotate_interleaved


def write_latents(
    down: Tensor,
    query_weight: Tensor | None,
    latent_weight: Tensor,
    eps: float,
    angles: Angles,
    slots: Tensor,
    latents: Tensor,
) -> Tensor:
    """See the operator. down [R, query + kv_lora + rope]."""
    kv_lora, rope = latent_weight.shape[0], angles.cos.shape[-1]
    query, latent, k_pe = torch.split(down, [down.shape[1] - kv_lora - rope, kv_lora, rope], 1)
    rotated = rotate_interleaved(k_pe.unsqueeze(1), angles)[:, 0]
    row = torch.cat((rms_norm(latent, latent_weight, eps), rotated), 1)
    latents.view(-1, latents.shape[2]).index_copy_(0, slots, row.to(latents.dtype))
    return query if query_weight is None else rms_norm(query, query_weight, eps)
