"""y = x / sqrt(mean(x^2) + eps) * weight, the variance in float32, cast before the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.scalar import scalar


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x [..., D]; weight [D]; result in x's dtype.

    torch.rsqrt divides by a square root, both correctly rounded in float32, so an element's bits do
    not depend on whether it fell into a vector or into its tail. torch.sqrt goes through MKL's
    vector library, which rounds one value in five otherwise.
    """
    wide = x.float()
    mean = (wide * wide).sum(-1, keepdim=True) * scalar(1.0 / x.shape[-1])
    scale = torch.rsqrt(mean + scalar(eps))
    return (wide * scale).to(x.dtype) * weight
