"""Multi-head latent attention in absorbed form (arXiv 2405.04434; docs/step.md)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdtree_engine.kernels.absorb import absorb
from kdtree_engine.kernels.latent_rows import write_latents
from kdtree_engine.kernels.linear import DenseWeight, product
from kdtree_engine.kernels.mla_attention import AttentionPlan, TablePlan, mla_attention
from kdtree_engine.kernels.rope import Angles
from kdtree_engine.kernels.value_up import value_up
from kdtree_engine.model.layers import Norm


@dataclass(frozen=True, eq=False)
class StepContext:
    """What every layer of one forward needs: where to write, what each row sees, its angles."""

    slots: Tensor  # [R] int64
    plan: AttentionPlan | TablePlan
    angles: Angles  # [R, 1, rope]


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """One layer's attention. The cache row of a token is [normed latent | rotated k_pe]."""

    # H -> q_lora + kv_lora + rope; without q_lora, heads * (nope + rope) stands in its place
    query_and_latent: DenseWeight
    query_norm: Norm | None  # None where q_lora_rank is null
    query_up: DenseWeight | None  # q_lora -> heads * (nope + rope)
    latent_norm: Norm
    key_up: Tensor  # [heads, nope, kv_lora], W_UK
    value_up: Tensor  # [heads, kv_lora, v], W_UV transposed
    output: DenseWeight  # heads * v -> H
    rope_dim: int
    softmax_scale: float

    def __call__(self, normed: Tensor, latents: Tensor, step: StepContext) -> Tensor:
        """normed [R, H] -> [R, H] or its parts; writes the rows into `latents` [pages, 64, D]."""
        kv_lora = self.key_up.shape[2]
        down = product(normed, self.query_and_latent)
        query = write_latents(
            down,
            None if self.query_norm is None else self.query_norm.weight,
            self.latent_norm.weight,
            self.latent_norm.eps,
            step.angles,
            step.slots,
            latents,
            self.query_and_latent.columns - kv_lora - self.rope_dim,
        )
        if self.query_up is not None:
            query = product(query, self.query_up)
        query = absorb(query, self.key_up, step.angles)  # [R, heads, kv_lora + rope]
        mixed = mla_attention(query, latents, step.plan, self.softmax_scale, kv_lora)
        return product(value_up(mixed, self.value_up), self.output)
