"""config.json objects of small models in the published formats (docs/checkpoints.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

K26 = "k2.6"
DEEPSEEK_V3 = "deepseek-v3"
K2 = "k2"
K2_THINKING = "k2-thinking"
FAMILIES = (K26, DEEPSEEK_V3, K2, K2_THINKING)

FORMATS = ("bf16", "int4", "fp8")
""""bf16": nothing is quantised; "int4": routed experts; "fp8": every projection."""

PUBLISHED_FORMAT = {K26: "int4", DEEPSEEK_V3: "bf16", K2: "fp8", K2_THINKING: "int4"}
"""What a family is written in where nothing else is asked for. DeepSeek-V3 comes in FP8, too."""

ZLAB = "z-lab"
SPECULATORS = "speculators"
LAYOUTS = (ZLAB, SPECULATORS)

Json = dict[str, Any]


@dataclass(frozen=True)
class Dims:
    """Sizes of a small model, in elements. None leaves the choice to the family."""

    vocab_size: int = 160
    hidden_size: int = 64
    num_layers: int = 4
    num_heads: int = 4
    q_lora_rank: int | None = 32  # None: a plain query projection
    kv_lora_rank: int = 32
    nope_dim: int = 16
    rope_dim: int = 8
    v_dim: int = 16
    intermediate_size: int = 96
    moe_intermediate_size: int = 32
    num_experts: int = 8
    num_shared_experts: int = 1
    experts_per_token: int = 2
    num_groups: int | None = None  # 1 for the Kimi line, 4 for deepseek-v3
    top_groups: int | None = None  # 1 for the Kimi line, 2 for deepseek-v3
    first_dense_layers: int | None = None  # 1 for the Kimi line, 2 for deepseek-v3
    mtp_layers: int | None = None  # 0 for the Kimi line, 1 for deepseek-v3
    rms_norm_eps: float = 1e-6  # what transformers fixes for the q_a and kv_a norms
    rope_theta: float | None = None  # 50,000 for the Kimi line, 10,000 for deepseek-v3
    yarn_factor: float | None = 64.0  # None: plain RoPE
    yarn_original: int = 64  # positions; short, so that tests cross it
    max_positions: int = 4096
    # The drafter, where one is written.
    drafter_layers: int = 2
    drafter_heads: int = 4
    drafter_kv_heads: int = 2
    drafter_head_dim: int = 16
    drafter_intermediate: int = 96
    block_size: int = 8
    taps: tuple[int, ...] | None = None  # None: three, spread as DFlash does
    drafter_layer_types: tuple[str, ...] | None = None  # None: full attention everywhere
    drafter_sliding_window: int = 32
    drafter_non_causal: bool = False  # sliding layers look both ways inside the block
    draft_vocab_size: int | None = None  # None: all of the vocabulary; speculators only
    sample_from_anchor: bool = False  # speculators only


THINKING_TEMPLATE = """\
{%- for message in messages -%}
<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think>{%- endif -%}
"""
"""A chat template that tells a K2-Thinking folder from K2's; the engine renders either itself."""


def model_template(family: str, dims: Dims, form: str | None = None) -> Json:
    """config.json of a target: `family` one of FAMILIES, `form` one of FORMATS or None."""
    assert family in FAMILIES, family
    form = form or PUBLISHED_FORMAT[family]
    assert form in FORMATS, form
    text = _deepseek_v3(dims) if family == DEEPSEEK_V3 else _kimi_k2(dims)
    if family in (K2, K2_THINKING) and text["rope_scaling"] is not None:
        text["rope_scaling"]["beta_fast"] = 1.0  # as published: a step, where others ramp
    if form != "bf16":
        text["quantization_config"] = INT4_SECTION if form == "int4" else FP8_SECTION
    return _k26(dims, text) if family == K26 else text


def generation_template(family: str, dims: Dims) -> Json:
    """generation_config.json. K2.6's stop ids here are more than those of its config.json."""
    _, eos, _ = _special_ids(dims)
    return {"eos_token_id": [eos, eos - 1] if family == K26 else eos}


def drafter_template(dims: Dims, theta: float = 50000.0, layout: str = ZLAB) -> Json:
    """config.json of a DFlash drafter in one of LAYOUTS (docs/checkpoints.md)."""
    assert layout in LAYOUTS, layout
    network = _drafter_network(dims, theta)
    if layout == SPECULATORS:  # whose ids do not reach the last layer's output
        return _speculators(dims, network, dims.taps or default_taps(dims.num_layers - 1))
    taps = dims.taps or default_taps(dims.num_layers)
    return network | {
        "architectures": ["DFlashDraftModel"],
        "block_size": dims.block_size,
        "dflash_config": {
            "mask_token_id": dims.vocab_size - 2,
            "target_layer_ids": list(taps),
        },
        "num_target_layers": dims.num_layers,
        **({"sliding_window_non_causal": True} if dims.drafter_non_causal else {}),
    }


def _speculators(dims: Dims, network: Json, taps: tuple[int, ...]) -> Json:
    """The speculators library's config around the network's; its ids name the layer after a tap."""
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "block_size": dims.block_size,
        "draft_vocab_size": dims.draft_vocab_size or dims.vocab_size,
        "dtype": "bfloat16",
        "mask_token_id": dims.vocab_size - 2,
        "sample_from_anchor": dims.sample_from_anchor,
        "sliding_window_non_causal": dims.drafter_non_causal,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": dims.block_size - (not dims.sample_from_anchor),
                }
            ],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": "dflash",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": network,
    }


def _drafter_network(dims: Dims, theta: float) -> Json:
    """What both layouts say of the layers, in the same words."""
    layer_types = dims.drafter_layer_types or ("full_attention",) * dims.drafter_layers
    sliding = "sliding_attention" in layer_types
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": dims.drafter_head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.drafter_intermediate,
        "layer_types": list(layer_types),
        "max_position_embeddings": dims.max_positions,
        "num_attention_heads": dims.drafter_heads,
        "num_hidden_layers": dims.drafter_layers,
        "num_key_value_heads": dims.drafter_kv_heads,
        "rms_norm_eps": dims.rms_norm_eps,
        "rope_scaling": yarn_template(dims),
        "rope_theta": dims.rope_theta or theta,
        "sliding_window": dims.drafter_sliding_window if sliding else None,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "vocab_size": dims.vocab_size,
    }


def default_taps(num_layers: int, count: int = 3) -> tuple[int, ...]:
    """0-based target layers to tap, as DFlash spreads them; over all layers if there are few."""
    if count == 1:
        return (num_layers // 2,)
    spread = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    if num_layers < 4 or len(set(spread)) < count:
        count = min(count, num_layers)
        spread = [round(i * (num_layers - 1) / max(count - 1, 1)) for i in range(count)]
    return tuple(spread)


def yarn_template(dims: Dims) -> Json | None:
    """`rope_scaling`, null for plain RoPE."""
    if dims.yarn_factor is None:
        return None
    return {
        "type": "yarn",
        "factor": dims.yarn_factor,
        "original_max_position_embeddings": dims.yarn_original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def _special_ids(dims: Dims) -> tuple[int, int, int]:
    """(bos, eos, pad): in the 256 special slots' places of K2.6 where the vocabulary has room."""
    slots = 256 if dims.vocab_size >= 1024 else 8
    first = dims.vocab_size - slots
    return first, first + 2, dims.vocab_size - 1


def _text(dims: Dims) -> Json:
    """What both families say of the language model."""
    bos, eos, pad = _special_ids(dims)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "ep_size": 1,
        "hidden_act": "silu",
        "hidden_size": dims.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": dims.intermediate_size,
        "kv_lora_rank": dims.kv_lora_rank,
        "max_position_embeddings": dims.max_positions,
        "moe_intermediate_size": dims.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_routed_experts": dims.num_experts,
        "n_shared_experts": dims.num_shared_experts,
        "norm_topk_prob": True,
        "num_attention_heads": dims.num_heads,
        "num_experts_per_tok": dims.experts_per_token,
        "num_hidden_layers": dims.num_layers,
        "num_key_value_heads": dims.num_heads,
        "pad_token_id": pad,
        "q_lora_rank": dims.q_lora_rank,
        "qk_nope_head_dim": dims.nope_dim,
        "qk_rope_head_dim": dims.rope_dim,
        "rms_norm_eps": dims.rms_norm_eps,
        "rope_scaling": yarn_template(dims),
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "v_head_dim": dims.v_dim,
        "vocab_size": dims.vocab_size,
    }


def _pick(value: int | None, default: int) -> int:
    return default if value is None else value


def _deepseek_v3(dims: Dims) -> Json:
    return _text(dims) | {
        "first_k_dense_replace": _pick(dims.first_dense_layers, 2),
        "model_type": "deepseek_v3",
        "n_group": _pick(dims.num_groups, 4),
        "num_nextn_predict_layers": _pick(dims.mtp_layers, 1),
        "rope_theta": dims.rope_theta or 10000.0,
        "routed_scaling_factor": 2.5,
        "topk_group": _pick(dims.top_groups, 2),
    }


def _kimi_k2(dims: Dims) -> Json:
    """K2 and K2-Thinking at top level, K2.5 and K2.6 as text_config."""
    return _text(dims) | {
        "first_k_dense_replace": _pick(dims.first_dense_layers, 1),
        "model_type": "kimi_k2",
        "n_group": _pick(dims.num_groups, 1),
        "num_nextn_predict_layers": _pick(dims.mtp_layers, 0),
        "rope_theta": dims.rope_theta or 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": _pick(dims.top_groups, 1),
    }


def _k26(dims: Dims, text: Json) -> Json:
    bos, eos, pad = _special_ids(dims)
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "bos_token_id": bos,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "ignore_index": -100,
        "media_placeholder_token_id": dims.vocab_size - 3,
        "model_type": "kimi_k25",
        "pad_token_id": pad,
        "projection_hidden_size": VISION_HIDDEN,
        "text_config": text,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "vision_config": _vision(dims),
    }


INT4_SECTION: Json = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""`quantization_config` of K2.6: INT4 for routed experts, symmetric, groups of 32."""

FP8_SECTION: Json = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""`quantization_config` of DeepSeek-V3 and K2: e4m3 for every projection."""

VISION_HIDDEN = 32
VISION_PATCH = 14
VISION_GRID = 4  # learned position embeddings, rows and columns
VISION_LAYERS = 1


def _vision(dims: Dims) -> Json:
    """A tiny vision tower. The upstream keys come first, then those that transformers reads."""
    return {
        "init_pos_emb_height": VISION_GRID,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": VISION_GRID,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": VISION_HIDDEN,
        "mm_projector_type": "patchmerger",
        "patch_size": VISION_PATCH,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "text_hidden_size": dims.hidden_size,
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": VISION_HIDDEN,
        "vt_intermediate_size": VISION_HIDDEN,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": VISION_LAYERS,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_HIDDEN,
        "num_attention_heads": 2,
        "num_hidden_layers": VISION_LAYERS,
        "pos_emb_height": VISION_GRID,
        "pos_emb_width": VISION_GRID,
    }
