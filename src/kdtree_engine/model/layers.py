"""Dense pieces that the networks share: norms with their weight, the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdtree_engine.kernels.add_norm import add_norm
from kdtree_engine.kernels.linear import DenseWeight, product
from kdtree_engine.kernels.rms_norm import rms_norm
from kdtree_engine.kernels.swiglu import swiglu_sum


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm with weight [D]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return rms_norm(x, self.weight, self.eps)

    def after(self, y: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """residual + y [R, D] and its norm; y may come in parts (`linear.product`)."""
        return add_norm(y, residual, self.weight, self.eps)


@dataclass(frozen=True, eq=False)
class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up fused into one product."""

    gate_up: DenseWeight  # [H -> 2 I], gate columns first
    down: DenseWeight  # [I -> H]

    def __call__(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H], or its parts (`linear.product`)."""
        inner = swiglu_sum(product(x, self.gate_up), self.gate_up.columns // 2, x.dtype)
        return product(inner, self.down)

    def add(self, normed: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """residual + mlp(normed), and that normed by `norm`: both [R, H]."""
        return norm.after(self(normed), residual)
