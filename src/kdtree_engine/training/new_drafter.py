"""A fresh drafter for a target: its config in z-lab's layout, and random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdtree_engine.checkpoints.names import drafter_tensors
from kdtree_engine.checkpoints.templates import default_taps
from kdtree_engine.config import DrafterConfig, ModelConfig
from kdtree_engine.errors import OptionError
from kdtree_engine.training.options import TrainOptions


def drafter_config(target: ModelConfig, options: TrainOptions) -> dict[str, Any]:
    """config.json (docs/checkpoints.md). The mask token is the vocabulary's last but one slot, as
    in the Kimi drafters; RoPE is plain with the target's theta.
    """
    heads = options.heads or max(1, target.hidden_size // options.head_dim)
    kv_heads = options.kv_heads or max(1, heads // 2)
    if heads % kv_heads:
        raise OptionError(f"{heads} heads cannot share {kv_heads} key-value heads evenly")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": options.block_size,
        "dflash_config": {
            "mask_token_id": target.vocab_size - 2,
            "target_layer_ids": list(default_taps(target.num_layers, options.taps)),
        },
        "dtype": "bfloat16",
        "head_dim": options.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": options.intermediate or 2 * target.hidden_size,
        "layer_types": ["full_attention"] * options.layers,
        "max_position_embeddings": target.max_positions,
        "num_attention_heads": heads,
        "num_hidden_layers": options.layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": target.num_layers,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": target.rope.theta,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
    }


def random_weights(config: DrafterConfig, seed: int) -> dict[str, Tensor]:
    """Tensors under their checkpoint names: norms of ones, products of variance 1 / fan-in, those
    that write to the residual stream smaller by the root of twice the depth.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, spec in drafter_tensors(config).items():
        shape = spec.shape
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        scale = shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            scale *= (2 * config.num_layers) ** -0.5
        weights[name] = torch.randn(shape, generator=generator) * scale
    return weights
