"""Multi-head latent attention in absorbed form (arXiv 2405.04434; checkpoints.md 4.6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.linear import ColumnBlocks, linear
from kdtree_engine.kernels.matmul import row_bmm
from kdtree_engine.kernels.mla_attention import AttentionPlan, mla_attention
from kdtree_engine.kernels.rope import rotate_interleaved
from kdtree_engine.model.layers import Norm


@dataclass(frozen=True, eq=False)
class StepContext:
    """What every layer of one forward needs: where to write, what each row sees, its angles."""

    slots: Tensor  # [R] int64
    plan: AttentionPlan
    cos: Tensor  # [R, rope / 2] float32
    sin: Tensor


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """One layer's attention. The cache row of a token is [normed latent | rotated k_pe]."""

    query_and_latent: (
        ColumnBlocks  # H -> q_lora + kv_lora + rope (q_lora = heads * (nope + rope) if null)
    )
    query_norm: Norm | None  # None where q_lora_rank is null
    query_up: ColumnBlocks | None  # q_lora -> heads * (nope + rope)
    latent_norm: Norm
    key_up: Tensor  # [heads, nope, kv_lora], W_UK
    value_up: Tensor  # [heads, kv_lora, v], W_UV transposed
    output: ColumnBlocks  # heads * v -> H
    nope_dim: int
    rope_dim: int
    softmax_scale: float

    def __call__(self, x: Tensor, latents: Tensor, step: StepContext) -> Tensor:
        """x [R, H] -> [R, H]; writes the rows into `latents` [pages, 64, kv_lora + rope]."""
        heads, _, kv_lora = self.key_up.shape
        down = linear(x, self.query_and_latent)
        query, latent, k_pe = torch.split(
            down, [down.shape[1] - kv_lora - self.rope_dim, kv_lora, self.rope_dim], 1
        )
        if self.query_norm is not None and self.query_up is not None:
            query = linear(self.query_norm(query), self.query_up)
        k_pe = rotate_interleaved(k_pe, step.cos, step.sin)
        row = torch.cat((self.latent_norm(latent), k_pe), 1)
        latents.view(-1, latents.shape[2]).index_copy_(0, step.slots, row.to(latents.dtype))

        heads_query = query.reshape(-1, heads, self.nope_dim + self.rope_dim)
        nope, q_pe = torch.split(heads_query, [self.nope_dim, self.rope_dim], 2)
        absorbed = row_bmm(nope.transpose(0, 1), self.key_up).transpose(0, 1)  # [R, heads, kv_lora]
        query = torch.cat((absorbed, rotate_interleaved(q_pe, step.cos, step.sin)), 2)
        mixed = mla_attention(query, latents, step.plan, self.softmax_scale, kv_lora)
        out = row_bmm(mixed.transpose(0, 1), self.value_up).transpose(0, 1)  # [R, heads, v]
        return linear(out.reshape(x.shape[0], -1), self.output)
