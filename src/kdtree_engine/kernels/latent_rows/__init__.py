"""Norm the query and the latent, rotate the key, and write the rows' places in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.latent_rows import reference
from kdtree_engine.kernels.launch import launch_options
from kdtree_engine.kernels.rms_norm import norm_shape
from kdtree_engine.kernels.rope import Angles


def write_latents(
    down: Tensor,
    query_weight: Tensor | None,
    latent_weight: Tensor,
    eps: float,
    angles: Angles,
    slots: Tensor,
    latents: Tensor,
    query_width: int,
) -> Tensor:
    """The query of the next product, [R, query] normed with `query_weight`, or as it came.

    down: [R, query + kv_lora + rope], or parts [S, R, width] to be added in order; `query_width`
    is the query's. latents [pages, 64, kv_lora + rope] gets each row's [normed latent | rotated
    k_pe] at its slot [R] int64. angles [R, 1, rope]. Without a query_weight `down` itself returns:
    its first columns are the query.
    """
    kv_lora, rope = latent_weight.shape[0], angles.cos.shape[-1]
    assert latents.shape[-1] == kv_lora + rope and latents.is_contiguous()
    assert down.shape[-1] >= query_width + kv_lora + rope
    if down.ndim == 2:
        return reference.write_latents(
            down, query_weight, latent_weight, eps, angles, slots, latents
        )
    return _launch(down, query_weight, latent_weight, eps, angles, slots, latents, query_width)


def _launch(
    parts: Tensor,
    query_weight: Tensor | None,
    latent_weight: Tensor,
    eps: float,
    angles: Angles,
    slots: Tensor,
    latents: Tensor,
    query_width: int,
) -> Tensor:
    from kdtree_engine.kernels.latent_rows.kernel import latent_rows

    count, rows, width = parts.shape
    kv_lora, rope = latent_weight.shape[0], angles.cos.shape[-1]
    normed = query_weight is not None
    query = torch.empty(
        rows, query_width if normed else 0, dtype=latents.dtype, device=parts.device
    )
    blocks = [norm_shape(one)[0] for one in (query_width if normed else 16, kv_lora, rope)]
    latent_rows[(rows,)](
        parts, query_weight if normed else latent_weight, latent_weight, angles.cos, angles.sin,
        slots, latents, query, rows, width, eps, query_width, kv_lora, rope, count, normed,
        *blocks, num_warps=4, **launch_options(parts),
    )  # fmt: skip
    return query if normed else parts


__all__ = ["write_latents"]
