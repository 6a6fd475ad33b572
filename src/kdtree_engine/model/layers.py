"""Dense pieces that the network shares: norms with their weight, the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdtree_engine.kernels.linear import ColumnBlocks, linear
from kdtree_engine.kernels.rms_norm import rms_norm
from kdtree_engine.kernels.swiglu import swiglu


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm with weight [D]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, eq=False)
class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up fused into one product."""

    gate_up: ColumnBlocks  # [H -> 2 I], gate columns first
    down: ColumnBlocks  # [I -> H]

    def __call__(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        return linear(swiglu(linear(x, self.gate_up)), self.down)
