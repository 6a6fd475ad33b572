"""Build the target network from an open checkpoint, one tensor at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.checkpoints import ModelCheckpoint
from kdtree_engine.config import ModelConfig
from kdtree_engine.kernels.experts import ExpertWeights, pack_experts
from kdtree_engine.kernels.fp8 import Fp8Tensor
from kdtree_engine.kernels.linear import DenseWeight, Parts, pack_columns, pack_weight
from kdtree_engine.kernels.rope import rope_table
from kdtree_engine.kernels.router import RouterSettings
from kdtree_engine.log import progress
from kdtree_engine.model.kimi import DecoderLayer, Kimi
from kdtree_engine.model.layers import GatedMLP, Norm
from kdtree_engine.model.mla import LatentAttention
from kdtree_engine.model.moe import MixtureOfExperts, PackedMixture


def load_target(
    checkpoint: ModelCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    kernels: bool | None = None,
) -> Kimi:
    """The network with its weights in `dtype` on `device`, laid out for kernels (by default on
    CUDA) or for the reference, which training needs.

    INT4 experts become bf16(q * scale), the checkpoint's reference value, before `dtype`; FP8
    weights q * scale in `dtype`. Kernels do so themselves: experts and most FP8 weights stay as
    stored. The router stays float32. Memory: the network itself and one tensor in flight.
    """
    return _Builder(
        checkpoint, dtype, device, device.type == "cuda" if kernels is None else kernels
    ).build()


class _Builder:
    def __init__(
        self,
        checkpoint: ModelCheckpoint,
        dtype: torch.dtype,
        device: torch.device,
        kernels: bool,
    ) -> None:
        self.checkpoint = checkpoint
        self.config: ModelConfig = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.kernels = kernels

    def build(self) -> Kimi:
        config = self.config
        layers = []
        with progress("loading layers", config.num_layers) as meter:
            for index in range(config.num_layers):
                layers.append(self.layer(index))
                meter.advance()
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        return Kimi(
            config,
            self.tensor("model.embed_tokens.weight"),
            tuple(layers),
            self.norm("model.norm.weight"),
            self.pack(self.raw(head)),
            rope_table(
                config.rope, config.rope_dim, config.max_positions, self.device, interleaved=True
            ),
        )

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        moe = self.config.is_moe_layer(index)
        return DecoderLayer(
            self.norm(prefix + "input_layernorm.weight"),
            self.attention(prefix + "self_attn."),
            self.norm(prefix + "post_attention_layernorm.weight"),
            self.experts(index, prefix + "mlp.") if moe else self.mlp(prefix + "mlp."),
        )

    def attention(self, prefix: str) -> LatentAttention:
        config = self.config
        low_rank = config.q_lora_rank is not None
        first = prefix + ("q_a_proj" if low_rank else "q_proj")
        up = self.dense(prefix + "kv_b_proj").to(self.device, self.dtype)
        up = up.view(config.num_heads, config.nope_dim + config.v_dim, config.kv_lora_rank)
        key_up, value_up = torch.split(up, [config.nope_dim, config.v_dim], 1)
        return LatentAttention(
            self.projection(first, prefix + "kv_a_proj_with_mqa"),
            self.norm(prefix + "q_a_layernorm.weight") if low_rank else None,
            self.projection(prefix + "q_b_proj") if low_rank else None,
            self.norm(prefix + "kv_a_layernorm.weight"),
            *self.per_head(key_up, value_up),
            self.projection(prefix + "o_proj"),
            config.rope_dim,
            config.softmax_scale,
        )

    def mlp(self, prefix: str) -> GatedMLP:
        return GatedMLP(
            self.projection(prefix + "gate_proj", prefix + "up_proj"),
            self.projection(prefix + "down_proj"),
        )

    def experts(self, index: int, prefix: str) -> MixtureOfExperts | PackedMixture:
        config = self.config
        settings = RouterSettings(
            config.experts_per_token,
            config.num_groups,
            config.top_groups,
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )
        bias = self.raw(prefix + "gate.e_score_correction_bias").to(self.device, torch.float32)
        if self.kernels:
            return self.packed_experts(index, prefix, bias, settings)
        gate = pack_columns(self.raw(prefix + "gate.weight"), torch.float32, self.device)
        shared = self.mlp(prefix + "shared_experts.") if config.num_shared_experts else None
        return MixtureOfExperts(gate, bias, settings, self.dense_experts(index), shared)

    def dense_experts(self, index: int) -> ExpertWeights:
        config = self.config
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        gate_up = torch.empty(
            config.num_experts, hidden, 2 * inner, dtype=self.dtype, device=self.device
        )
        down = torch.empty(config.num_experts, inner, hidden, dtype=self.dtype, device=self.device)
        source = self.checkpoint.experts(index)
        for expert in range(config.num_experts):
            gate_up[expert] = source.gate_up(expert, self.dtype).T
            down[expert] = source.down(expert, self.dtype).T
        return ExpertWeights(gate_up, down)

    def packed_experts(
        self, index: int, prefix: str, bias: Tensor, settings: RouterSettings
    ) -> PackedMixture:
        """The router and the shared expert's first product as one dense weight, experts as stored.

        The shared expert's second product is dense too, where its experts need not be.
        """
        shared_down, columns = None, [self.raw(prefix + "gate.weight")]
        if self.config.num_shared_experts:
            own = prefix + "shared_experts."
            shared_down = self.dense(own + "down_proj")
            columns += [self.dense(f"{own}{name}_proj") for name in ("gate", "up")]
        exact = torch.equal(columns[0].to(self.dtype).float(), columns[0].float())
        dtype = self.dtype if exact else torch.float32
        source = self.checkpoint.experts(index)
        return PackedMixture(
            pack_weight(columns, dtype, self.device, kernels=True),
            bias,
            settings,
            pack_experts(
                source.pairs(self.dtype),
                self.config.num_experts,
                shared_down,
                self.dtype,
                self.device,
            ),
            0 if shared_down is None else shared_down.shape[1],
            dtype,
        )

    def raw(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name)

    def tensor(self, name: str) -> Tensor:
        return self.raw(name).to(self.device, self.dtype)

    def dense(self, module: str) -> Tensor:
        """A module's weight as stored, or its values in `dtype` where that is FP8."""
        weight = self.checkpoint.weight(module)
        return weight.dequantize(self.dtype) if isinstance(weight, Fp8Tensor) else weight

    def projection(self, *modules: str) -> DenseWeight:
        """One product for modules of the same input, their outputs side by side.

        FP8 blocks count from each module's own first row.
        """
        return self.pack([self.checkpoint.weight(module) for module in modules])

    def pack(self, weight: Parts) -> DenseWeight:
        return pack_weight(weight, self.dtype, self.device, self.kernels)

    def per_head(self, key_up: Tensor, value_up: Tensor) -> tuple[Tensor, Tensor]:
        """W_UK [heads, nope, kv_lora], W_UV [heads, kv_lora, v], each given [heads, out, kv_lora].

        Kernels read both along their inputs: W_UK's memory is then transposed, W_UV's as stored.
        """
        if self.kernels:
            # A split of one head counts as contiguous with the whole's strides: `contiguous` would
            # keep them, and kernels go by strides.
            whole = torch.contiguous_format
            stored = [x.clone(memory_format=whole) for x in (key_up.transpose(1, 2), value_up)]
            return stored[0].transpose(1, 2), stored[1].transpose(1, 2)
        return key_up.contiguous(), value_up.transpose(1, 2).contiguous()

    def norm(self, name: str) -> Norm:
        return Norm(self.tensor(name), self.config.rms_norm_eps)
