"""config.json of a DFlash drafter in z-lab's layout to a DrafterConfig, and its fit to a target.

Fields as z-lab's DFlash checkpoints have them (docs/checkpoints.md). What would change the draft's
arithmetic and is not implemented (DFlash 2, logit caps) is refused, since it would quietly cost
acceptance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdtree_engine.checkpoints.model_config import CONFIG_FILE, MAX_LAYERS, MAX_POSITIONS
from kdtree_engine.checkpoints.reader import check_folder, read_json
from kdtree_engine.checkpoints.rope_config import read_rope
from kdtree_engine.checkpoints.section import Section
from kdtree_engine.config import DrafterConfig, ModelConfig
from kdtree_engine.errors import ConfigError, DrafterError

LAYER_TYPES = ("full_attention", "sliding_attention")

DFLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def is_drafter(folder: Path) -> bool:
    """Whether the config of a folder speaks of a drafter, in any layout. ConfigError if broken."""
    check_folder(folder)
    data = read_json(folder, CONFIG_FILE, ConfigError)
    return "dflash_config" in data or "speculators_model_type" in data


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The DrafterConfig of a folder.

    ConfigError for a key that is absent or not implemented, DrafterError for values with which no
    draft could work (mask token outside the vocabulary, block of fewer than 2).
    """
    where = str(folder / CONFIG_FILE)
    return parse_drafter_config(read_json(folder, CONFIG_FILE, ConfigError), where)


def parse_drafter_config(data: dict[str, Any], where: str) -> DrafterConfig:
    """The DrafterConfig of a config.json's object; `where` begins error messages."""
    top = Section(data, where)
    if "speculators_model_type" in top:
        raise top.error(
            "speculators_model_type",
            "marks the speculators layout, which is not read yet; supported: z-lab's DFlash layout",
        )
    if "architectures" not in top:
        raise top.error("architectures", "is missing")
    top.must_be("architectures", ["DFlashDraftModel"])
    inner = top.section("dflash_config")
    _refuse_variants(top, inner)
    layers = top.size("num_hidden_layers", most=MAX_LAYERS)
    layer_types = top.texts("layer_types") or ("full_attention",) * layers
    _check_layer_types(top, layer_types, layers)
    sliding = top.size("sliding_window") if "sliding_attention" in layer_types else None
    config = DrafterConfig(
        hidden_size=top.size("hidden_size"),
        intermediate_size=top.size("intermediate_size"),
        num_layers=layers,
        num_heads=top.size("num_attention_heads"),
        num_kv_heads=top.size("num_key_value_heads"),
        head_dim=top.size("head_dim"),
        vocab_size=top.size("vocab_size"),
        block_size=_either(top, inner, "block_size"),
        mask_token_id=inner.size("mask_token_id", least=0),
        tap_layers=inner.ids("target_layer_ids"),
        num_target_layers=_either(top, inner, "num_target_layers"),
        rms_norm_eps=top.number("rms_norm_eps"),
        rope=read_rope(top),
        layer_types=layer_types,
        sliding_window=sliding,
        window=inner.size("draft_window") if "draft_window" in inner else None,
        max_positions=top.size("max_position_embeddings", 0, least=0, most=MAX_POSITIONS),
    )
    _check(top, config)
    return config


def check_drafter(drafter: DrafterConfig, target: ModelConfig) -> None:
    """DrafterError with the reason if `drafter` cannot draft for `target`."""
    pairs = (
        ("hidden size", drafter.hidden_size, target.hidden_size),
        ("vocabulary size", drafter.vocab_size, target.vocab_size),
        ("number of target layers", drafter.num_target_layers, target.num_layers),
    )
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise DrafterError(f"the drafter's {what} is {ours}, but the target's is {theirs}")
    _check_own_values(drafter, "the drafter")
    outside = [tap for tap in drafter.tap_layers if not 0 <= tap < target.num_layers]
    if outside:
        raise DrafterError(
            f"the drafter taps layers {outside}, but the target has layers 0 to "
            f"{target.num_layers - 1}"
        )


def _either(top: Section, inner: Section, key: str) -> int:
    """A size that may stand at top level or in dflash_config; ConfigError if the two disagree."""
    if key in top and key in inner and top.size(key) != inner.size(key):
        raise top.error(key, f"is {top.size(key)}, but dflash_config says {inner.size(key)}")
    return (inner if key in inner else top).size(key)


def _refuse_variants(top: Section, inner: Section) -> None:
    """Values that change the arithmetic in a way that the drafter does not implement."""
    for section in (top, inner):
        for key in DFLASH_2:
            if key in section:
                raise section.error(key, "marks a DFlash 2 drafter, which is not supported")
        section.must_be("attention_mode", "gqa", "full")
        section.must_be("input_embedding_scale", 1, 1.0)
        section.must_be("output_multiplier", 1, 1.0)
        section.must_be("final_logit_softcapping")
    top.must_be("hidden_act", "silu")
    top.must_be("attention_bias", False)


def _check_layer_types(top: Section, layer_types: tuple[str, ...], layers: int) -> None:
    if len(layer_types) != layers:
        raise top.error("layer_types", f"has {len(layer_types)} entries for {layers} layers")
    for one in layer_types:
        if one not in LAYER_TYPES:
            raise top.error("layer_types", f"has {one!r}; supported: {', '.join(LAYER_TYPES)}")
    # In the block full attention looks both ways, sliding is causal, unless is_causal says else.
    if "is_causal" in top:
        causal = top.flag("is_causal")
        if any((one == "sliding_attention") != causal for one in layer_types):
            raise top.error(
                "is_causal", f"is {causal} for {', '.join(sorted(set(layer_types)))}: not supported"
            )
    top.must_be("sliding_window_non_causal", False)


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
    if config.block_size < 2:
        raise DrafterError(f"{who}: block_size {config.block_size} drafts nothing; at least 2")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise DrafterError(
            f"{who}: mask_token_id {config.mask_token_id} is outside of the vocabulary of "
            f"{config.vocab_size}"
        )
    taps = config.tap_layers
    if not taps or len(set(taps)) != len(taps):
        raise DrafterError(f"{who}: target_layer_ids {list(taps)} must be distinct and not empty")
    outside = [tap for tap in taps if not 0 <= tap < config.num_target_layers]
    if outside:
        raise DrafterError(
            f"{who}: target_layer_ids {outside} are outside of a target of "
            f"{config.num_target_layers} layers"
        )
