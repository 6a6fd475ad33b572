"""Multi-head latent attention in absorbed form (arXiv 2405.04434; docs/step.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.linear import ColumnBlocks, linear
from kdtree_engine.kernels.matmul import row_bmm
from kdtree_engine.kernels.mla_attention import AttentionPlan, mla_attention
from kdtree_engine.kernels.rope import Angles, rotate_interleaved
from kdtree_engine.model.layers import Norm


@dataclass(frozen=True, eq=False)
class StepContext:
    """What every layer of one forward needs: where to write, what each row sees, its angles."""

    slots: Tensor  # [R] int64
    plan: AttentionPlan
    angles: Angles  # [R, 1, rope]


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """One layer's attention. The cache row of a token is [normed latent | rotated k_pe]."""

    # H -> q_lora + kv_lora + rope; without q_lora, heads * (nope + rope) stands in its place
    query_and_latent: ColumnBlocks
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
        rope, count = self.rope_dim, x.shape[0]
        down = linear(x, self.query_and_latent)
        query, latent, k_pe = torch.split(down, [down.shape[1] - kv_lora - rope, kv_lora, rope], 1)
        if self.query_norm is not None and self.query_up is not None:
            query = linear(self.query_norm(query), self.query_up)
        nope, q_pe = torch.split(query.reshape(count, heads, -1), [self.nope_dim, rope], 2)
        rotated = rotate_interleaved(torch.cat((q_pe, k_pe.unsqueeze(1)), 1), step.angles)
        row = torch.cat((self.latent_norm(latent), rotated[:, heads]), 1)
        latents.view(-1, latents.shape[2]).index_copy_(0, step.slots, row.to(latents.dtype))

        absorbed = row_bmm(nope.transpose(0, 1), self.key_up).transpose(0, 1)  # [R, heads, kv_lora]
        query = torch.cat((absorbed, rotated[:, :heads]), 2)
        mixed = mla_attention(query, latents, step.plan, self.softmax_scale, kv_lora)
        out = row_bmm(mixed.transpose(0, 1), self.value_up).transpose(0, 1)  # [R, heads, v]
        return linear(out.reshape(count, -1), self.output)
