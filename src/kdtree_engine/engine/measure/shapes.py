"""The models that `kdtree bench` builds from random weights, and one rank's share of them."""

from __future__ import annotations

from dataclasses import replace

from kdtree_engine.config import DrafterConfig, DraftMask, ModelConfig, RopeConfig
from kdtree_engine.errors import OptionError

KIMI_K26 = ModelConfig(
    family="k2.5",
    vocab_size=163_840,
    hidden_size=7168,
    num_layers=61,
    num_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    intermediate_size=18_432,
    moe_intermediate_size=2048,
    num_experts=384,
    num_shared_experts=1,
    experts_per_token=8,
    num_groups=1,
    top_groups=1,
    routed_scaling_factor=2.827,
    norm_topk_prob=True,
    first_dense_layers=1,
    moe_layer_freq=1,
    rms_norm_eps=1e-5,
    rope=RopeConfig(50_000.0, "yarn", 64.0, 4096, 32.0, 1.0, 1.0, 1.0),
    max_positions=262_144,
    quantization="int4",
)
"""Kimi K2.6's text_config."""

TINY = replace(
    KIMI_K26,
    vocab_size=1024,
    hidden_size=128,
    num_layers=3,
    num_heads=16,
    q_lora_rank=48,
    kv_lora_rank=64,
    nope_dim=16,
    rope_dim=16,
    v_dim=16,
    intermediate_size=256,
    moe_intermediate_size=1024,
    num_experts=12,
    experts_per_token=3,
    max_positions=8192,
)
"""The same kind of network, small enough for a CPU, and like K2.6 one that eight ranks divide."""

SHAPES = {"kimi-k2.6": KIMI_K26, "tiny": TINY}

KIMI_K26_DFLASH = DrafterConfig(
    hidden_size=7168,
    intermediate_size=18_432,
    num_layers=6,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=163_840,
    block_size=8,
    mask_token_id=163_838,
    tap_layers=(1, 12, 24, 35, 47, 58),
    num_target_layers=61,
    rms_norm_eps=1e-5,
    rope=RopeConfig(50_000.0, "yarn", 64.0, 4096, 32.0, 1.0, 1.0, 1.0),
    masks=(DraftMask(window=4096),) * 6,
    max_positions=262_144,
)
"""z-lab's Kimi-K2.6-DFlash, with the window that it is served with."""

TINY_DFLASH = replace(
    KIMI_K26_DFLASH,
    hidden_size=TINY.hidden_size,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=TINY.vocab_size,
    mask_token_id=TINY.vocab_size - 2,
    tap_layers=(0, 2),
    num_target_layers=TINY.num_layers,
    masks=(DraftMask(window=64),) * 2,
    max_positions=TINY.max_positions,
)

DRAFTERS = {"kimi-k2.6": KIMI_K26_DFLASH, "tiny": TINY_DFLASH}


def drafter_shape(name: str, target: ModelConfig) -> DrafterConfig:
    """The named model's drafter beside `target`, a share of it: whole on every rank, as served.

    Its head is the target's, so that is divided with the vocabulary, and the mask token moves
    inside. Taps behind the last layer of a shortened target come from its last one.
    """
    drafter = DRAFTERS[name]
    last = target.num_layers - 1
    return replace(
        drafter,
        vocab_size=target.vocab_size,
        mask_token_id=min(drafter.mask_token_id, target.vocab_size - 2),
        tap_layers=tuple(min(layer, last) for layer in drafter.tap_layers),
        num_target_layers=target.num_layers,
    )


def shape(name: str, layers: int | None = None) -> ModelConfig:
    """The named model, or its first `layers` layers. OptionError for what there is not."""
    if name not in SHAPES:
        raise OptionError(f"--shape is {name!r}: expected one of {', '.join(SHAPES)}")
    config = SHAPES[name]
    if layers is None:
        return config
    if not 1 <= layers <= config.num_layers:
        raise OptionError(f"--layers is {layers}: {name} has 1 to {config.num_layers}")
    return replace(config, num_layers=layers)


def share(config: ModelConfig, ranks: int) -> ModelConfig:
    """What one of `ranks` ranks holds, as the config of a smaller model.

    Heads, the MLPs' and experts' inner width and the vocabulary are divided; the down projections
    to the query's and the cache's rank, the router and the cache itself are whole on every rank.
    """
    divided = {
        "heads": config.num_heads,
        "inner widths": config.intermediate_size,
        "experts' inner widths": config.moe_intermediate_size,
        "vocabulary": config.vocab_size,
    }
    for what, count in divided.items():
        if ranks < 1 or count % ranks:
            raise OptionError(f"--rank-of is {ranks}: the {what} ({count}) cannot be divided so")
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
        moe_intermediate_size=config.moe_intermediate_size // ranks,
        vocab_size=config.vocab_size // ranks,
    )
