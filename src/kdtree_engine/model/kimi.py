"""The target network: one forward for prefill, plain decoding and draft trees alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.config import ModelConfig
from kdtree_engine.kernels.linear import ColumnBlocks, linear
from kdtree_engine.kernels.matmul import padded_rows
from kdtree_engine.kernels.mla_attention import plan_attention
from kdtree_engine.kernels.rope import RopeTable
from kdtree_engine.model.layers import GatedMLP, Norm
from kdtree_engine.model.mla import LatentAttention, StepContext
from kdtree_engine.model.moe import MixtureOfExperts
from kdtree_engine.types import StepInputs, TargetOutput


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention_norm: Norm
    attention: LatentAttention
    mlp_norm: Norm
    mlp: GatedMLP | MixtureOfExperts

    def __call__(self, x: Tensor, latents: Tensor, step: StepContext) -> Tensor:
        """Residual stream [R, H] -> [R, H]."""
        x = x + self.attention(self.attention_norm(x), latents, step)
        return x + self.mlp(self.mlp_norm(x))


@dataclass(frozen=True, eq=False)
class Kimi:
    """A DeepSeek-V3 / Kimi-K2 class target. It reads and writes where it is told and decides
    nothing.
    """

    config: ModelConfig
    embedding: Tensor  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: ColumnBlocks  # H -> V
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
        taps: dict[int, Tensor] = {}
        for index, (layer, cache) in enumerate(zip(self.layers, latents, strict=True)):
            x = layer(x, cache, step)
            if index in tap_layers:
                taps[index] = x[:rows]
        logits = self.logits(x, inputs.logit_rows)
        joined = torch.cat([taps[index] for index in tap_layers], 1) if tap_layers else None
        return TargetOutput(logits, joined)

    def logits(self, x: Tensor, wanted: Tensor) -> Tensor:
        """float32 logits [L, V] of the rows `wanted` [L] of the last layer's output [R, H]."""
        count = int(wanted.shape[0])
        if not count:
            return x.new_zeros((0, self.config.vocab_size), dtype=torch.float32)
        padded = _repeat_last(wanted, padded_rows(count, self.device) - count)
        return linear(self.norm(x.index_select(0, padded)), self.head)[:count].float()


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
