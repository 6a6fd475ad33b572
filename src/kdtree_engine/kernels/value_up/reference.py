"""From latent space to the heads' values: W_UV after the attention (arXiv 2405.04434)."""

from __future__ import annotations

from torch import Tensor

from kdtree_engine.kernels.matmul import row_bmm


def value_up(mixed: Tensor, weight: Tensor) -> Tensor:
    """See the operator."""
    out = row_bmm(mixed.transpose(0, 1), weight).transpose(0, 1)  # [R, heads, v]
    return out.reshape(mixed.shape[0], -1)
