"""Absorbed queries of multi-head latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.absorb import reference
from kdtree_engine.kernels.launch import launch_options, precise
from kdtree_engine.kernels.rope import Angles


def absorb(query: Tensor, key_up: Tensor, angles: Angles) -> Tensor:
    """[R, heads, kv_lora + rope] in key_up's dtype: queries that meet cached rows directly.

    query: [R, heads * (nope + rope)], each head its nope part first, or parts [S, R, width] to be
    added in order. key_up [heads, nope, kv_lora]: W_UK; for kernels its memory is [heads, kv_lora,
    nope]. angles [R, 1, rope].
    """
    if query.ndim == 2:
        return reference.absorb(query, key_up, angles)
    return _launch(query, key_up, angles)


def _launch(
    parts: Tensor, key_up: Tensor, angles: Angles, tiles: tuple[int, int] = (64, 4)
) -> Tensor:
    """tiles: latent columns of a program, and its warps."""
    from kdtree_engine.kernels.absorb.kernel import absorb_rows

    heads, nope, latent = key_up.shape
    count, rows, width = parts.shape
    rope = angles.cos.shape[-1]
    assert key_up.stride() == (nope * latent, 1, nope), f"key_up strides {key_up.stride()}"
    assert width >= heads * (nope + rope)
    out = torch.empty(rows, heads, latent + rope, dtype=key_up.dtype, device=parts.device)
    block_t = min(32, max(8, 1 << (rows - 1).bit_length()))
    block_c, warps = tiles
    grid = (heads, -(-latent // block_c) + 1, -(-rows // block_t))
    absorb_rows[grid](
        parts, key_up, angles.cos, angles.sin, out, rows, width, heads, nope, latent, rope, count,
        block_c, max(16, 1 << (nope - 1).bit_length()), max(16, 1 << (rope - 1).bit_length()),
        block_t, precise(key_up), num_warps=warps, **launch_options(parts),
    )  # fmt: skip
    return out


__all__ = ["absorb"]
