"""The target network: one forward for prefill, plain decoding and draft trees alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.config import ModelConfig
from kdtree_engine.kernels.linear import DenseWeight, linear
from kdtree_engine.kernels.matmul import padded_rows
from kdtree_engine.kernels.mla_attention import plan_attention
from kdtree_engine.kernels.rope import RopeTable
from kdtree_engine.model.layers import GatedMLP, Norm
from kdtree_engine.model.mla import LatentAttention, StepContext
from kdtree_engine.model.moe import MixtureOfExperts, PackedMixture
from kdtree_engine.types import StepInputs, TargetOutput


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Every addition is followed by a norm, so the two are one operator and the residual stream
    travels with its norm: a layer takes both, and gives both, normed for what comes after it.
    """

    attention_norm: Norm
    attention: LatentAttention
    mlp_norm: Norm
    mlp: GatedMLP | MixtureOfExperts | PackedMixture

    def __call__(
        self, x: Tensor, normed: Tensor, latents: Tensor, step: StepContext, following: Norm
    ) -> tuple[Tensor, Tensor]:
        """Residual stream x [R, H] and attention_norm(x) -> the same after this layer, normed by
        `following`.
        """
        x, normed = self.mlp_norm.after(self.attention(normed, latents, step), x)
        return self.mlp.add(normed, x, following)


@dataclass(frozen=True, eq=False)
class Kimi:
    """A DeepSeek-V3 / Kimi-K2 class target. It reads and writes where it is told and decides
    nothing.
    """

    config: ModelConfig
    embedding: Tensor  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: DenseWeight  # H -> V
    rope: RopeTable

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    def forward(
        self,
        inputs: StepInputs,
        latents: Sequence[Tensor],
        reserved: tuple[int, int],
        tap_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Logits of the wanted rows, and the outputs of `tap_layers`, for one step.

        latents: one cache tensor [pages, 64, kv_lora + rope] a layer. reserved: the cache's null
        slot (always zeros) and its spill slot (written by padding rows, never read).
        """
        null_slot, spill_slot = reserved
        rows = int(inputs.tokens.shape[0])
        extra = padded_rows(rows, self.device) - rows
        padded = _pad(inputs, extra, spill_slot)
        angles = self.rope.at(padded.positions).over_heads()
        step = StepContext(padded.slots, plan_attention(padded, null_slot), angles)
        x = self.embedding.index_select(0, padded.tokens)
        normed = self.layers[0].attention_norm(x)
        following = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        taps: dict[int, Tensor] = {}
        for index, (layer, cache) in enumerate(zip(self.layers, latents, strict=True)):
            x, normed = layer(x, normed, cache, step, following[index])
            if index in tap_layers:
                taps[index] = x[:rows]
        logits = self.logits(normed, inputs.logit_rows)
        joined = torch.cat([taps[index] for index in tap_layers], 1) if tap_layers else None
        return TargetOutput(logits, joined)

    def logits(self, normed: Tensor, wanted: Tensor) -> Tensor:
        """float32 logits [L, V] of the rows `wanted` [L] of the last layer's normed output
        [R, H].
        """
        count = int(wanted.shape[0])
        if not count:
            return normed.new_zeros((0, self.config.vocab_size), dtype=torch.float32)
        padded = _repeat_last(wanted, padded_rows(count, self.device) - count)
        return linear(normed.index_select(0, padded), self.head, torch.float32)[:count]


def _pad(inputs: StepInputs, extra: int, spill_slot: int) -> StepInputs:
    """Append `extra` copies of the last row that write to the spill slot."""
    if not extra:
        return inputs
    return StepInputs(
        _repeat_last(inputs.tokens, extra),
        _repeat_last(inputs.positions, extra),
        torch.cat((inputs.slots, inputs.slots.new_full((extra,), spill_slot))),
        inputs.spans,
        inputs.logit_rows,
    )


def _repeat_last(x: Tensor, extra: int) -> Tensor:
    return torch.cat((x, x[-1:].expand(extra))) if extra else x
