"""Mixture of experts as DeepSeek-V3 has it (arXiv 2412.19437): router, routed experts, shared
expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdtree_engine.kernels.experts import ExpertWeights, routed_experts
from kdtree_engine.kernels.linear import DenseWeight, linear
from kdtree_engine.kernels.router import RouterSettings, route
from kdtree_engine.model.layers import GatedMLP, Norm


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """Routed experts in the router's order, then the shared expert, unscaled and ungated."""

    gate: DenseWeight  # H -> E, float32
    bias: Tensor  # [E] float32, for the choice only
    settings: RouterSettings
    experts: ExpertWeights
    shared: GatedMLP | None

    def __call__(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        experts, weights = route(linear(x.float(), self.gate), self.bias, self.settings)
        out = routed_experts(x, experts, weights, self.experts).to(x.dtype)
        return out if self.shared is None else out + self.shared(x)

    def add(self, normed: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """residual + experts(normed), and that normed by `norm`: both [R, H]."""
        return norm.after(self(normed), residual)
