"""x + y and its norm: where one block of the network ends and the next begins."""

from __future__ import annotations

from torch import Tensor

from kdtree_engine.kernels.rms_norm.reference import rms_norm


def add_norm(y: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + y and its RMS norm, both [R, H], from y and residual [R, H]."""
    x = residual + y
    return x, rms_norm(x, weight, eps)
