"""Build a DFlash network from a checkpoint, and write one back in the same layout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kdtree_engine.checkpoints import DrafterCheckpoint
from kdtree_engine.checkpoints.names import DRAFT_TO_TARGET, EMBED_TOKENS, LM_HEAD
from kdtree_engine.checkpoints.names import drafter_tensors as expected
from kdtree_engine.config import DrafterConfig
from kdtree_engine.drafter.dflash_model import DFlashLayer, DFlashModel
from kdtree_engine.kernels.linear import DenseWeight, pack_weight
from kdtree_engine.kernels.rope import rope_table
from kdtree_engine.model.layers import GatedMLP, Norm


def load_drafter(
    checkpoint: DrafterCheckpoint, dtype: torch.dtype, device: torch.device, positions: int = 0
) -> DFlashModel:
    """The network of a checkpoint, its weights in `dtype` on `device`, for inference.

    It drafts for at least `positions` positions, the target's, even where its config says fewer or
    nothing: only the guesses may suffer.
    """
    config = checkpoint.config
    config = replace(config, max_positions=max(config.max_positions, positions))
    names = [*expected(config)]
    names += [EMBED_TOKENS] * checkpoint.has_embedding + [LM_HEAD] * checkpoint.has_head
    tensors = {name: checkpoint.tensor(name) for name in names}
    kernels = device.type == "cuda"
    return build_drafter(config, tensors, dtype, device, kernels, checkpoint.tokens)


def build_drafter(
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    kernels: bool = False,
    tokens: Tensor | None = None,
) -> DFlashModel:
    """The network from tensors named as in a checkpoint, [out, in]; laid out for kernels, or for
    training. An embedding and a head are used where given. tokens [D]: of the head's rows, where
    these are not the vocabulary.
    """
    eps = config.rms_norm_eps

    def pack(*names: str) -> DenseWeight:
        return pack_weight(rows(*names), dtype, device, kernels)

    def norm(name: str) -> Norm:
        return Norm(tensors[name + ".weight"].to(device, dtype), eps)

    def rows(*names: str) -> Tensor:
        return torch.cat([tensors[name + ".weight"] for name in names])

    def layer(prefix: str) -> DFlashLayer:
        attention = prefix + "self_attn."
        return DFlashLayer(
            norm(prefix + "input_layernorm"),
            pack(attention + "q_proj"),
            pack(attention + "k_proj", attention + "v_proj"),
            norm(attention + "q_norm"),
            norm(attention + "k_norm"),
            pack(attention + "o_proj"),
            norm(prefix + "post_attention_layernorm"),
            GatedMLP(
                pack(prefix + "mlp.gate_proj", prefix + "mlp.up_proj"),
                pack(prefix + "mlp.down_proj"),
            ),
        )

    own = tensors[EMBED_TOKENS].to(device, dtype) if EMBED_TOKENS in tensors else None
    return DFlashModel(
        config,
        pack("fc"),
        norm("hidden_norm"),
        tuple(layer(f"layers.{index}.") for index in range(config.num_layers)),
        norm("norm"),
        rope_table(config.rope, config.head_dim, config.max_positions, device, interleaved=False),
        own,
        pack("lm_head") if LM_HEAD in tensors else None,
        None if tokens is None else tokens.to(device),
    )


def drafter_tensors(model: DFlashModel) -> dict[str, Tensor]:
    """The network's weights under their checkpoint names, [out, in]: the inverse of
    `build_drafter`.
    """
    config = model.config
    out = {
        "fc": model.fc.matrix(),
        "hidden_norm": model.hidden_norm.weight,
        "norm": model.norm.weight,
    }
    for index, layer in enumerate(model.layers):
        prefix, width = f"layers.{index}.", config.num_kv_heads * config.head_dim
        key_value, gate_up = layer.key_value.matrix(), layer.mlp.gate_up.matrix()
        out[prefix + "input_layernorm"] = layer.input_norm.weight
        out[prefix + "self_attn.q_proj"] = layer.query.matrix()
        out[prefix + "self_attn.k_proj"] = key_value[:width]
        out[prefix + "self_attn.v_proj"] = key_value[width:]
        out[prefix + "self_attn.q_norm"] = layer.query_norm.weight
        out[prefix + "self_attn.k_norm"] = layer.key_norm.weight
        out[prefix + "self_attn.o_proj"] = layer.output.matrix()
        out[prefix + "post_attention_layernorm"] = layer.mlp_norm.weight
        out[prefix + "mlp.gate_proj"] = gate_up[: config.intermediate_size]
        out[prefix + "mlp.up_proj"] = gate_up[config.intermediate_size :]
        out[prefix + "mlp.down_proj"] = layer.mlp.down.matrix()
    if model.embedding is not None:
        out["embed_tokens"] = model.embedding
    if model.head is not None:
        out["lm_head"] = model.head.matrix()
    tensors = {name + ".weight": tensor.detach().contiguous() for name, tensor in out.items()}
    if model.tokens is not None:
        places = torch.arange(len(model.tokens), device=model.tokens.device)
        tensors[DRAFT_TO_TARGET] = model.tokens - places
    return tensors
