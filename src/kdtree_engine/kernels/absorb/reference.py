"""Queries against latents: W_UK moves from the keys to the query (arXiv 2405.04434)."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.matmul import row_bmm
from kdtree_engine.kernels.rope import Angles, rotate_interleaved


def absorb(query: Tensor, key_up: Tensor, angles: Angles) -> Tensor:
    """See the operator. query [R, heads * (nope + rope)]."""
    heads, nope_dim, _ = key_up.shape
    rope = angles.cos.shape[-1]
    nope, q_pe = torch.split(query.reshape(query.shape[0], heads, -1), [nope_dim, rope], 2)
    absorbed = row_bmm(nope.transpose(0, 1), key_up).transpose(0, 1)  # [R, heads, kv_lora]
    return torch.cat((absorbed, rotate_interleaved(q_pe, angles)), 2)
