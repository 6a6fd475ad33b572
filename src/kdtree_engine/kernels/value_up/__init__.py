"""Values of multi-head latent attention, from what attention mixed in latent space."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import has_kernel, launch_options, precise
from kdtree_engine.kernels.value_up import reference


def value_up(mixed: Tensor, weight: Tensor) -> Tensor:
    """[R, heads * v] from mixed [R, heads, kv_lora] and weight [heads, kv_lora, v], W_UV.

    For kernels the weight's memory is [heads, v, kv_lora].
    """
    assert mixed.shape[1:] == weight.shape[:2], f"{list(mixed.shape)}, {list(weight.shape)}"
    if not has_kernel(mixed) or weight.is_contiguous():
        return reference.value_up(mixed, weight)
    return _launch(mixed, weight)


def _launch(mixed: Tensor, weight: Tensor, tiles: tuple[int, int, int] = (32, 256, 2)) -> Tensor:
    """tiles: value columns and latent columns of a program's step, and its warps."""
    from kdtree_engine.kernels.value_up.kernel import value_up_rows

    heads, latent, value = weight.shape
    rows = mixed.shape[0]
    assert weight.stride() == (latent * value, 1, latent), f"strides {weight.stride()}"
    out = torch.empty(rows, heads * value, dtype=mixed.dtype, device=mixed.device)
    block_t = min(32, max(8, 1 << (rows - 1).bit_length()))
    block_v, most_c, warps = tiles
    block_c = min(most_c, max(16, 1 << (latent - 1).bit_length()))
    grid = (heads, -(-value // block_v), -(-rows // block_t))
    value_up_rows[grid](
        mixed.contiguous(), weight, out, rows, heads, latent, value, block_v, block_c, block_t,
        precise(mixed), num_warps=warps, **launch_options(mixed),
    )  # fmt: skip
    return out


__all__ = ["value_up"]
