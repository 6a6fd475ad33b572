"""Mixture of experts as DeepSeek-V3 has it (arXiv 2412.19437): router, routed experts, shared
expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.experts import (
    ExpertWeights,
    PackedExperts,
    combine_add_norm,
    expert_mlp,
    routed_experts,
)
from kdtree_engine.kernels.linear import DenseWeight, linear, product
from kdtree_engine.kernels.router import RouterSettings, route, route_rows
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


@dataclass(frozen=True, eq=False)
class PackedMixture:
    """The same laid out for kernels: the shared expert shares its launches with the others.

    gate: one product for the router's logits and the shared expert's gate and up. Its dtype is the
    activations', whose products float32 sums hold exactly, or float32 where the checkpoint's router
    is finer than that.
    """

    gate: DenseWeight  # H -> E + 2 shared_inner
    bias: Tensor  # [E] float32, for the choice only
    settings: RouterSettings
    experts: PackedExperts  # the shared expert's down among them
    shared_inner: int
    dtype: torch.dtype  # of `gate`

    def add(self, normed: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """residual + experts(normed), and that normed by `norm`: both [R, H]."""
        parts = product(normed.to(self.dtype), self.gate)
        routing = route_rows(parts, self.bias, self.settings, self.shared_inner, normed.dtype)
        out = expert_mlp(normed, routing, self.experts)
        return combine_add_norm(
            out.down_out, routing.weights, out.shared_out, residual, norm.weight, norm.eps
        )
