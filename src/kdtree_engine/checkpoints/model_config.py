"""config.json and generation_config.json of a target to a ModelConfig.

One row of FAMILIES per architecture: further members of the family are further rows. Values that
merely look like constants of the family (eps, beta_fast) are read too (docs/checkpoints.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdtree_engine.checkpoints.quantization import find_quantization, read_quantization
from kdtree_engine.checkpoints.reader import present, read_json, read_text
from kdtree_engine.checkpoints.rope_config import read_rope
from kdtree_engine.checkpoints.section import Section
from kdtree_engine.config import ModelConfig
from kdtree_engine.errors import ConfigError
from kdtree_engine.kernels.int4 import GROUP

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"

DRAFTER_KEYS = ("dflash_config", "speculators_model_type")
"""Either stands in a drafter's config.json, in whichever layout, and in no target's."""

MAX_LAYERS = 4096
"""More than any model has: an absurd number must not make us list its tensors."""

MAX_POSITIONS = 1 << 22
"""More than any model has: a row of rotary angles is tabulated for every position."""


def names_drafter(data: Mapping[str, Any]) -> bool:
    """Whether a config.json's object is a drafter's, in any layout."""
    return any(key in data for key in DRAFTER_KEYS)


def read_model_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a model folder. ConfigError names the file and the key at fault."""
    data = read_json(folder, CONFIG_FILE, ConfigError)
    if names_drafter(data):
        raise ConfigError(f"{folder}: is a drafter, not a model; give it as --drafter (drafter=)")
    extra_stops: tuple[int, ...] = ()
    if present(folder / GENERATION_FILE):
        generation = read_json(folder, GENERATION_FILE, ConfigError)
        extra_stops = Section(generation, str(folder / GENERATION_FILE)).ids("eos_token_id")
    config = parse_model_config(data, str(folder / CONFIG_FILE), extra_stops)
    if config.family == "k2" and names_thinking(folder):
        return replace(config, family="k2-thinking")
    return config


def names_thinking(folder: Path) -> bool:
    """Whether the folder's dialogues know <think>: K2-Thinking's mark.

    K2 and K2-Thinking share a model_type, and either may be quantised anew by others. The chat
    template decides, the first of those that tokenizer.template looks for; only without one the
    special tokens do. ConfigError or CheckpointError for a file that is broken.
    """
    if present(folder / TEMPLATE_FILE):
        return "<think>" in read_text(folder, TEMPLATE_FILE, ConfigError)
    tokens: Any = None
    for name in (TEMPLATE_JSON, TOKENIZER_FILE):
        data = read_json(folder, name, ConfigError) if present(folder / name) else {}
        if data.get("chat_template"):
            return "<think>" in str(data["chat_template"])
        tokens = data.get("added_tokens_decoder")
    entries = tokens.values() if isinstance(tokens, dict) else ()
    return any(isinstance(one, dict) and one.get("content") == "<think>" for one in entries)


def parse_model_config(
    data: dict[str, Any], where: str, extra_stops: tuple[int, ...] = ()
) -> ModelConfig:
    """The ModelConfig of a config.json's object; `where` begins error messages.

    `extra_stops` are the stop ids of generation_config.json. Raises ConfigError.
    """
    top = Section(data, where)
    name = top.text("model_type")
    reader = FAMILIES.get(name)
    if reader is None:
        raise top.error("model_type", f"is {name!r}; supported: {', '.join(FAMILIES)}")
    config = reader(top, extra_stops)
    _check(top, config)
    return config


def _read_deepseek_v3(top: Section, extra_stops: tuple[int, ...]) -> ModelConfig:
    """DeepSeek-V3: one flat object."""
    top.must_be("architectures", ["DeepseekV3ForCausalLM"])
    return _read_text(top, top, "deepseek-v3", extra_stops)


def _read_kimi_k2(top: Section, extra_stops: tuple[int, ...]) -> ModelConfig:
    """K2-Instruct, K2-0905 and K2-Thinking: DeepSeek-V3's object under another model_type."""
    top.must_be("architectures", ["DeepseekV3ForCausalLM"])
    return _read_text(top, top, "k2", extra_stops)


def _read_kimi_k25(top: Section, extra_stops: tuple[int, ...]) -> ModelConfig:
    """K2.5 and K2.6: the language model under `text_config`, vision beside it."""
    top.must_be(
        "architectures", ["KimiK25ForConditionalGeneration"], ["Kimi_K25ForConditionalGeneration"]
    )
    text = top.section("text_config")
    text.must_be("model_type", "kimi_k2", "deepseek_v3")
    return _read_text(top, text, "k2.5", extra_stops)


FAMILIES: dict[str, Callable[[Section, tuple[int, ...]], ModelConfig]] = {
    "deepseek_v3": _read_deepseek_v3,
    "kimi_k2": _read_kimi_k2,
    "kimi_k25": _read_kimi_k25,
}
"""model_type -> reader."""


def _read_text(
    top: Section, text: Section, family: str, extra_stops: tuple[int, ...]
) -> ModelConfig:
    """The language model's own values. Token ids at top level win over those inside `text`."""
    _refuse_variants(text)

    def outer(key: str) -> Section:
        return top if key in top else text

    stops = outer("eos_token_id").ids("eos_token_id") + extra_stops
    mtp = "num_nextn_predict_layers"
    return ModelConfig(
        family=family,
        vocab_size=text.size("vocab_size"),
        hidden_size=text.size("hidden_size"),
        num_layers=text.size("num_hidden_layers", most=MAX_LAYERS),
        num_heads=text.size("num_attention_heads"),
        q_lora_rank=text.size("q_lora_rank") if "q_lora_rank" in text else None,
        kv_lora_rank=text.size("kv_lora_rank"),
        nope_dim=text.size("qk_nope_head_dim"),
        rope_dim=text.size("qk_rope_head_dim"),
        v_dim=text.size("v_head_dim"),
        intermediate_size=text.size("intermediate_size"),
        moe_intermediate_size=text.size("moe_intermediate_size"),
        num_experts=text.size("n_routed_experts"),
        num_shared_experts=text.size("n_shared_experts", 0, least=0),
        experts_per_token=text.size("num_experts_per_tok"),
        num_groups=text.size("n_group", 1),
        top_groups=text.size("topk_group", 1),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        norm_topk_prob=text.flag("norm_topk_prob"),
        first_dense_layers=text.size("first_k_dense_replace", least=0),
        moe_layer_freq=text.size("moe_layer_freq", 1),
        rms_norm_eps=text.number("rms_norm_eps"),
        rope=read_rope(text),
        max_positions=text.size("max_position_embeddings", most=MAX_POSITIONS),
        tie_word_embeddings=text.flag("tie_word_embeddings", False),
        quantization=read_quantization(find_quantization(top, text)),
        tensor_prefix="language_model." if text is not top else "",
        num_mtp_layers=text.size(
            mtp if mtp in text else "num_mtp_layers", 0, least=0, most=MAX_LAYERS
        ),
        bos_token_id=outer("bos_token_id").one_id("bos_token_id"),
        pad_token_id=outer("pad_token_id").one_id("pad_token_id"),
        eos_token_ids=tuple(dict.fromkeys(stops)),
    )


def _refuse_variants(text: Section) -> None:
    """Values that would change the arithmetic in a way that the engine does not implement."""
    text.must_be("hidden_act", "silu")
    text.must_be("scoring_func", "sigmoid")
    text.must_be("topk_method", "noaux_tc")
    text.must_be("attention_bias", False)
    text.must_be("rope_interleave", True)
    if "q_lora_rank" not in text.data:
        raise text.error("q_lora_rank", "is missing (null stands for a plain query projection)")
    heads = text.size("num_attention_heads")
    text.must_be("num_key_value_heads", heads)


def _check(top: Section, config: ModelConfig) -> None:
    """Values that contradict each other."""

    def refuse(text: str) -> None:
        raise ConfigError(f"{top.where}: {text}")

    if config.rope_dim % 2:
        refuse(f"qk_rope_head_dim {config.rope_dim} is odd")
    if config.num_experts % config.num_groups:
        refuse(
            f"{config.num_experts} experts do not divide into n_group {config.num_groups} groups"
        )
    if config.top_groups > config.num_groups:
        refuse(f"topk_group {config.top_groups} exceeds n_group {config.num_groups}")
    in_group = config.num_experts // config.num_groups
    if config.num_groups > 1 and in_group < 2:
        refuse(
            f"n_group {config.num_groups} leaves {in_group} expert a group, at least 2 are needed,"
            " since a group's score is the sum of its best two"
        )
    if config.experts_per_token > in_group * config.top_groups:
        refuse(
            f"num_experts_per_tok {config.experts_per_token} exceeds the "
            f"{in_group * config.top_groups} experts that a token may choose from"
        )
    if config.quantization == "int4":
        for key in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, key) % GROUP:
                refuse(f"INT4 needs {key} to be a multiple of {GROUP}, not {getattr(config, key)}")
