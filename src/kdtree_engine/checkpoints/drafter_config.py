"""config.json of a DFlash drafter to a DrafterConfig, and its fit to a target.

Two layouts: z-lab's, flat with a `dflash_config`, and that of the speculators library, marked by
`speculators_model_type`, with the network under `transformer_layer_config` (docs/checkpoints.md).
What would change the draft's arithmetic and is not implemented (DFlash 2, logit caps) is refused,
since it would quietly cost acceptance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdtree_engine.checkpoints.model_config import (
    CONFIG_FILE,
    FAMILIES,
    MAX_LAYERS,
    MAX_POSITIONS,
    names_drafter,
)
from kdtree_engine.checkpoints.reader import check_folder, read_json
from kdtree_engine.checkpoints.rope_config import read_rope
from kdtree_engine.checkpoints.section import Section
from kdtree_engine.config import DrafterConfig, DraftMask, ModelConfig
from kdtree_engine.errors import ConfigError, DrafterError

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")

MAX_BLOCK = 256
"""More slots than any drafter has: a step computes each of them."""

DFLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def is_drafter(folder: Path) -> bool:
    """Whether the config of a folder speaks of a drafter, in any layout. ConfigError if broken."""
    check_folder(folder)
    data = read_json(folder, CONFIG_FILE, ConfigError)
    return names_drafter(data)


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The DrafterConfig of a folder.

    ConfigError for a key that is absent or not implemented, DrafterError for values with which no
    draft could work (mask token outside the vocabulary, block of fewer than 2).
    """
    data = read_json(folder, CONFIG_FILE, ConfigError)
    if data.get("model_type") in FAMILIES and not names_drafter(data):
        raise ConfigError(f"{folder}: is a model, not a drafter; give it as MODEL (model=)")
    return parse_drafter_config(data, str(folder / CONFIG_FILE))


def parse_drafter_config(data: dict[str, Any], where: str) -> DrafterConfig:
    """The DrafterConfig of a config.json's object; `where` begins error messages."""
    top = Section(data, where)
    config = _speculators(top) if "speculators_model_type" in top else _zlab(top)
    _check(top, config)
    return config


def _zlab(top: Section) -> DrafterConfig:
    if "architectures" not in top:
        raise top.error("architectures", "is missing")
    top.must_be("architectures", ["DFlashDraftModel"])
    if "target_num_hidden_layers" in top and "dflash_config" not in top:
        raise top.error(
            "target_num_hidden_layers",
            "marks TorchSpec's training config, which does not say the block size; export the "
            "drafter with a config in z-lab's layout",
        )
    inner = top.section("dflash_config")
    _refuse_variants(top, inner)
    top.must_be("sample_from_anchor", False)
    inner.must_be("use_swa", False)
    inner.must_be("swa_window_size")
    types = _layer_types(top)
    sliding = top.size("sliding_window") if SLIDING in types else None
    window = inner.size("draft_window") if "draft_window" in inner else None
    masks = tuple(
        DraftMask(_is_causal(top, inner, one), window, sliding if one == SLIDING else None)
        for one in types
    )
    return DrafterConfig(
        **_network(top),
        block_size=_either(top, inner, "block_size", MAX_BLOCK),
        mask_token_id=inner.size("mask_token_id", least=0),
        tap_layers=inner.ids("target_layer_ids"),
        num_target_layers=_either(top, inner, "num_target_layers", MAX_LAYERS),
        masks=masks,
        draft_vocab_size=top.size("draft_vocab_size") if "draft_vocab_size" in top else None,
    )


def _is_causal(top: Section, inner: Section, kind: str) -> bool:
    """Whether a layer of `kind` is causal inside the block.

    `is_causal`, or `causal` in dflash_config, says it for all layers; without it full attention
    looks both ways and sliding is causal, unless `sliding_window_non_causal`.
    """
    said = {
        section.flag(key)
        for section, key in ((top, "is_causal"), (inner, "causal"))
        if key in section
    }
    if len(said) > 1:
        raise top.error("is_causal", "contradicts dflash_config.causal")
    both_ways = top.flag("sliding_window_non_causal", False)
    return said.pop() if said else kind == SLIDING and not both_ways


def _speculators(top: Section) -> DrafterConfig:
    """As vllm-project/speculators writes it and its training uses it (models/dflash).

    An auxiliary id k is the hidden state **before** target layer k, so the output of layer k - 1:
    their own converter adds one to z-lab's ids, vLLM subtracts it again. A sliding layer sees the
    last `sliding_window` context tokens before the root, and of the block all rows, or with
    `sliding_window_non_causal` false those up to its own; full layers look both ways.
    """
    top.must_be("speculators_model_type", "dflash")
    top.must_be("architectures", ["DFlashDraftModel"], ["DFlashSpeculator"])
    inner = top.section("transformer_layer_config")
    _refuse_variants(top, inner)
    top.must_be("projector_type", "dflash")
    top.must_be("shift_label", False)
    inner.must_be("model_type", "qwen3", "llama")
    inner.must_be("hc_mult")
    top.must_be("target_hidden_size", inner.size("hidden_size"))
    types = _layer_types(inner)
    sliding, causal = None, False
    if SLIDING in types:
        sliding = inner.size("sliding_window")
        if "sliding_window_non_causal" not in top:
            raise top.error(
                "sliding_window_non_causal",
                "is missing, and readers disagree on what that means (speculators: false, vLLM: "
                "true); add what the drafter was trained with",
            )
        causal = not top.flag("sliding_window_non_causal")
    window = top.size("draft_window") if "draft_window" in top else None
    limits = [one for one in (window, sliding) if one is not None]
    masks = {FULL: DraftMask(window=window), SLIDING: DraftMask(causal, min(limits, default=None))}
    taps = top.ids("aux_hidden_state_layer_ids")
    if 0 in taps:
        raise top.error(
            "aux_hidden_state_layer_ids",
            f"is {list(taps)}: id k is the input of target layer k, and the input of layer 0, the "
            "embedding, is not a tap; expected ids from 1 on",
        )
    return DrafterConfig(
        **_network(inner),
        block_size=top.size("block_size", most=MAX_BLOCK),
        mask_token_id=top.size("mask_token_id", least=0),
        tap_layers=tuple(one - 1 for one in taps),
        num_target_layers=None,
        masks=tuple(masks[one] for one in types),
        draft_vocab_size=top.size("draft_vocab_size"),
        from_anchor=top.flag("sample_from_anchor", False),
    )


def _network(section: Section) -> dict[str, Any]:
    """The fields that describe the layers, named alike in both layouts."""
    return {
        "hidden_size": section.size("hidden_size"),
        "intermediate_size": section.size("intermediate_size"),
        "num_layers": section.size("num_hidden_layers", most=MAX_LAYERS),
        "num_heads": section.size("num_attention_heads"),
        "num_kv_heads": section.size("num_key_value_heads"),
        "head_dim": section.size("head_dim"),
        "vocab_size": section.size("vocab_size"),
        "rms_norm_eps": section.number("rms_norm_eps"),
        "rope": read_rope(section),
        "max_positions": section.size("max_position_embeddings", 0, least=0, most=MAX_POSITIONS),
    }


def check_drafter(drafter: DrafterConfig, target: ModelConfig) -> None:
    """DrafterError with the reason if `drafter` cannot draft for `target`."""
    pairs = (
        ("hidden size", drafter.hidden_size, target.hidden_size),
        ("vocabulary size", drafter.vocab_size, target.vocab_size),
        ("number of target layers", drafter.num_target_layers, target.num_layers),
    )
    for what, ours, theirs in pairs:
        if ours not in (theirs, None):
            raise DrafterError(f"the drafter's {what} is {ours}, but the target's is {theirs}")
    _check_own_values(drafter, "the drafter")
    if drafter.num_target_layers is None:
        ids = [tap + 1 for tap in drafter.tap_layers if tap + 1 >= target.num_layers]
        if ids:
            raise DrafterError(
                f"the drafter's aux_hidden_state_layer_ids {ids} are outside of the target: id k "
                f"is the input of target layer k, 1 to {target.num_layers - 1}"
            )
    outside = [tap for tap in drafter.tap_layers if not 0 <= tap < target.num_layers]
    if outside:
        raise DrafterError(
            f"the drafter taps layers {outside}, but the target has layers 0 to "
            f"{target.num_layers - 1}"
        )


def _either(top: Section, inner: Section, key: str, most: int) -> int:
    """A size that may stand at top level or in dflash_config; ConfigError if the two disagree."""
    if key in top and key in inner and top.size(key) != inner.size(key):
        raise top.error(key, f"is {top.size(key)}, but dflash_config says {inner.size(key)}")
    return (inner if key in inner else top).size(key, most=most)


def _refuse_variants(top: Section, inner: Section) -> None:
    """Values that change the arithmetic in a way that the drafter does not implement."""
    for section in (top, inner):
        for key in DFLASH_2:
            if key in section:
                raise section.error(key, "marks a DFlash 2 drafter, which is not supported")
        section.must_be("attention_mode", "gqa", "full")
        section.must_be("input_embedding_scale", 1, 1.0)
        section.must_be("output_multiplier", 1, 1.0)
        section.must_be("logit_scale", 1, 1.0)
        section.must_be("final_logit_softcapping")
        section.must_be("attention_sink_bias", False)
        section.must_be("add_swa_attention_sink_bias", False)
        section.must_be("use_aux_hidden_state", True)
        section.must_be("is_neox_style", True)
        section.must_be("hidden_act", "silu")
        section.must_be("attention_bias", False)


def _layer_types(section: Section) -> tuple[str, ...]:
    """One of LAYER_TYPES a layer; full attention everywhere where the key is absent."""
    layers = section.size("num_hidden_layers", most=MAX_LAYERS)
    types = section.texts("layer_types")
    if SLIDING in types and not section.flag("use_sliding_window", True):
        raise section.error(
            "use_sliding_window",
            f"is false, but layer_types has {SLIDING}: transformers then sets no limit, other "
            "readers do; set it true, or those layers to full_attention, as in training",
        )
    if not types:
        slides = section.flag("use_sliding_window", False)
        if slides and section.size("max_window_layers", layers, least=0) < layers:
            raise section.error("layer_types", "is missing, but max_window_layers lets some slide")
        return (FULL,) * layers
    if len(types) != layers:
        raise section.error("layer_types", f"has {len(types)} entries for {layers} layers")
    for one in types:
        if one not in LAYER_TYPES:
            raise section.error("layer_types", f"has {one!r}; supported: {', '.join(LAYER_TYPES)}")
    return types


def _check(top: Section, config: DrafterConfig) -> None:
    """Values that contradict each other."""
    if config.num_heads % config.num_kv_heads:
        raise top.error(
            "num_attention_heads",
            f"is {config.num_heads}, not a multiple of num_key_value_heads {config.num_kv_heads}",
        )
    if config.head_dim % 2:
        raise top.error("head_dim", f"is {config.head_dim}, expected an even number")
    _check_own_values(config, top.where)


def _check_own_values(config: DrafterConfig, who: str) -> None:
    """DrafterError for values that no target would suit; `who` begins the message."""
    if config.horizon < 1:
        raise DrafterError(f"{who}: block_size {config.block_size} drafts nothing; at least 2")
    if (config.draft_vocab_size or 0) > config.vocab_size:
        raise DrafterError(
            f"{who}: draft_vocab_size {config.draft_vocab_size} exceeds the vocabulary of "
            f"{config.vocab_size}"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise DrafterError(
            f"{who}: mask_token_id {config.mask_token_id} is outside of the vocabulary of "
            f"{config.vocab_size}"
        )
    taps = config.tap_layers
    if config.num_target_layers is None:
        if not taps or len(set(taps)) != len(taps):
            ids = [tap + 1 for tap in taps]
            raise DrafterError(
                f"{who}: aux_hidden_state_layer_ids {ids} must be distinct and not empty"
            )
        return
    if not taps or len(set(taps)) != len(taps):
        raise DrafterError(f"{who}: target_layer_ids {list(taps)} must be distinct and not empty")
    outside = [tap for tap in taps if not 0 <= tap < config.num_target_layers]
    if outside:
        raise DrafterError(
            f"{who}: target_layer_ids {outside} are outside of a target of "
            f"{config.num_target_layers} layers"
        )
