"""Tiny random checkpoints under the real names, for tests. Values are float32 unless packed."""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import INT4_GROUP, Array, Config, is_sparse, round_to_bf16

YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def target_config(**changes: Any) -> dict[str, Any]:
    """Two dense layers, then two sparse ones with groups; no two dimensions are equal."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "vocab_size": 131,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 1000.0,
        "rope_scaling": dict(YARN),
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    return {**config, **changes}


def linear_shapes(config: Config, layer: int) -> dict[str, tuple[int, int]]:
    """The [out, in] of every linear of a layer, without the `model.layers.N.` prefix."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    qk = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rank, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
    shapes = {
        "self_attn.kv_a_proj_with_mqa": (rank + config["qk_rope_head_dim"], hidden),
        "self_attn.kv_b_proj": (heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), rank),
        "self_attn.o_proj": (hidden, heads * config["v_head_dim"]),
    }
    if q_rank is None:
        shapes["self_attn.q_proj"] = (heads * qk, hidden)
    else:
        shapes["self_attn.q_a_proj"] = (q_rank, hidden)
        shapes["self_attn.q_b_proj"] = (heads * qk, q_rank)
    mlps = {"mlp": config["intermediate_size"]}
    if is_sparse(config, layer):
        width = config["moe_intermediate_size"]
        shapes["mlp.gate"] = (config["n_routed_experts"], hidden)
        mlps = {f"mlp.experts.{e}": width for e in range(config["n_routed_experts"])}
        if config["n_shared_experts"]:
            mlps["mlp.shared_experts"] = width * config["n_shared_experts"]
    for module, width in mlps.items():
        shapes[f"{module}.gate_proj"] = shapes[f"{module}.up_proj"] = (width, hidden)
        shapes[f"{module}.down_proj"] = (hidden, width)
    return shapes


def target_weights(config: Config, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        value: Array = rng.normal(size=(rows, columns)) / np.sqrt(columns)
        return value.astype(np.float32)

    def norm(width: int) -> Array:
        return (1.0 + 0.2 * rng.normal(size=width)).astype(np.float32)

    hidden, vocab = config["hidden_size"], config["vocab_size"]
    out = {
        "model.embed_tokens.weight": rng.normal(size=(vocab, hidden)).astype(np.float32),
        "model.norm.weight": norm(hidden),
        "lm_head.weight": matrix(vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for module, shape in linear_shapes(config, layer).items():
            out[f"{prefix}{module}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{name}.weight"] = norm(hidden)
        out[f"{prefix}self_attn.kv_a_layernorm.weight"] = norm(config["kv_lora_rank"])
        if config["q_lora_rank"] is not None:
            out[f"{prefix}self_attn.q_a_layernorm.weight"] = norm(config["q_lora_rank"])
        if is_sparse(config, layer):
            bias = 0.3 * np.asarray(rng.normal(size=config["n_routed_experts"]))
            out[f"{prefix}mlp.gate.e_score_correction_bias"] = bias.astype(np.float32)
    return out


def drafter_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 131,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "max_position_embeddings": 512,
        "block_size": 5,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 130, "target_layer_ids": [0, 2]},
    }
    return {**config, **changes}


def drafter_weights(config: Config, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    hidden, width, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, shared = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, taps * hidden),
        "hidden_norm": (hidden,),
        "norm": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        shapes[f"{name}.self_attn.q_proj"] = (query, hidden)
        shapes[f"{name}.self_attn.k_proj"] = shapes[f"{name}.self_attn.v_proj"] = (shared, hidden)
        shapes[f"{name}.self_attn.o_proj"] = (hidden, query)
        shapes[f"{name}.self_attn.q_norm"] = shapes[f"{name}.self_attn.k_norm"] = (dim,)
        shapes[f"{name}.mlp.gate_proj"] = shapes[f"{name}.mlp.up_proj"] = (width, hidden)
        shapes[f"{name}.mlp.down_proj"] = (hidden, width)
        shapes[f"{name}.input_layernorm"] = shapes[f"{name}.post_attention_layernorm"] = (hidden,)
    out = {}
    for module, shape in shapes.items():
        draw: Array = rng.normal(size=shape)
        value = np.asarray(1.0 + 0.2 * draw if len(shape) == 1 else draw / np.sqrt(shape[-1]))
        out[f"{module}.weight"] = value.astype(np.float32)
    return out


def pack_int4(weight: Array) -> tuple[Array, Array, Array]:
    """float [out, in] -> weight_packed, weight_scale (bf16 values), weight_shape."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // INT4_GROUP, INT4_GROUP)
    scale = round_to_bf16(np.abs(grouped).max(axis=-1) / np.float32(7.5))  # [out, in/32]
    q = np.clip(np.rint(grouped / scale[..., None]), -8, 7).reshape(rows, columns)
    nibbles = (q + 8).astype(np.uint32).reshape(rows, columns // 8, 8)
    words = np.zeros(nibbles.shape[:2], dtype=np.uint32)
    for place in range(8):
        words |= nibbles[:, :, place] << np.uint32(4 * place)
    return words.view(np.int32), scale, np.array([rows, columns], dtype=np.int32)


def with_int4_experts(weights: dict[str, Array]) -> dict[str, Array]:
    """The same checkpoint with its routed experts in the packed form."""
    out = {}
    for name, value in weights.items():
        if ".mlp.experts." not in name:
            out[name] = value
            continue
        packed, scale, shape = pack_int4(value)
        out |= {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": shape}
    return out
