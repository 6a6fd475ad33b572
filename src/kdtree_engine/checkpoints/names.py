"""The tensors that a folder must hold, by canonical name: shapes and dtypes from the config.

Canonical names are DeepSeek-V3's (`model.layers.0...`), without the `language_model.` of K2.5 and
K2.6. Shapes are [out, in] for linear weights (docs/checkpoints.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kdtree_engine.checkpoints.quantization import (
    FP8,
    INT4,
    PACKED,
    SCALE,
    SCALE_INV,
    SHAPE,
    WEIGHT,
)
from kdtree_engine.config import DrafterConfig, ModelConfig
from kdtree_engine.kernels.fp8 import blocks_of
from kdtree_engine.kernels.int4 import GROUP, NIBBLES

FLOATS = ("BF16", "F16", "F32")
"""Dtypes of a dense weight, in safetensors' names."""

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

EMBED_TOKENS = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
DRAFT_TO_TARGET = "d2t"
TARGET_TO_DRAFT = "t2d"

TORCHSPEC_NAMES = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}

VERIFIER_PREFIXES = ("verifier_lm_head.", "verifier_norm.")
"""What the speculators library trains against and older files hold: copies from the target."""

VISION_PREFIXES = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True)
class TensorSpec:
    """Shape in elements and the dtypes that may be stored."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


def expert_module(layer: int, expert: int, projection: str) -> str:
    """Canonical module name of one projection of a routed expert."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}"


def expert_shape(config: ModelConfig, projection: str) -> tuple[int, int]:
    """(out, in) of a routed expert's projection."""
    wide = config.moe_intermediate_size, config.hidden_size
    return wide if projection != "down_proj" else (wide[1], wide[0])


def expert_modules(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every routed expert's projections, layer by layer: canonical module name, (out, in)."""
    for layer in range(config.num_layers):
        if config.is_moe_layer(layer):
            for expert in range(config.num_experts):
                for projection in PROJECTIONS:
                    yield expert_module(layer, expert, projection), expert_shape(config, projection)


def dense_form(module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    """The one tensor of an unquantised module."""
    return {module + WEIGHT: TensorSpec(shape)}


def int4_form(module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    """The three tensors of an INT4 module; compressed-tensors writes weight_shape as int64."""
    rows, columns = shape
    return {
        module + PACKED: TensorSpec((rows, columns // NIBBLES), ("I32",)),
        module + SCALE: TensorSpec((rows, columns // GROUP), ("BF16",)),
        module + SHAPE: TensorSpec((2,), ("I32", "I64")),
    }


def fp8_form(module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    """The two tensors of an FP8 module."""
    return {
        module + WEIGHT: TensorSpec(shape, ("F8_E4M3",)),
        module + SCALE_INV: TensorSpec(blocks_of(*shape), ("F32",)),
    }


FORMS = {INT4: int4_form, FP8: fp8_form}
"""Quantised form -> the tensors of a module in it."""


def projection_of(name: str) -> str | None:
    """The module whose weight `name` is, if it is one that FP8 checkpoints quantise, else None.

    That is every projection of attention, MLPs and experts; not the router, norms, embedding, head.
    """
    module = name.removesuffix(WEIGHT)
    last = module.rpartition(".")[2]
    return module if module != name and last.endswith(("_proj", "_proj_with_mqa")) else None


def expected_tensors(config: ModelConfig, experts: bool = True) -> dict[str, TensorSpec]:
    """Canonical name -> spec of every tensor of the language model, lm_head only if it is untied.

    All unquantised but routed experts, which are in the form that the config declares;
    `experts=False` leaves them out.
    """
    specs = {
        "model.embed_tokens.weight": TensorSpec((config.vocab_size, config.hidden_size)),
        "model.norm.weight": TensorSpec((config.hidden_size,)),
    }
    if not config.tie_word_embeddings:
        specs["lm_head.weight"] = TensorSpec((config.vocab_size, config.hidden_size))
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        specs.update((prefix + name, spec) for name, spec in layer_tensors(config, layer).items())
    if experts:
        form = FORMS.get(config.quantization, dense_form)
        for module, shape in expert_modules(config):
            specs.update(form(module, shape))
    return specs


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    """Tensors of decoder layer `layer` besides routed experts, named inside the layer."""
    hidden, heads = config.hidden_size, config.num_heads
    query = heads * (config.nope_dim + config.rope_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (config.latent_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (config.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (
            heads * (config.nope_dim + config.v_dim),
            config.kv_lora_rank,
        ),
        "self_attn.o_proj.weight": (hidden, heads * config.v_dim),
    }
    if config.q_lora_rank is None:
        shapes["self_attn.q_proj.weight"] = (query, hidden)
    else:
        shapes["self_attn.q_a_proj.weight"] = (config.q_lora_rank, hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (config.q_lora_rank,)
        shapes["self_attn.q_b_proj.weight"] = (query, config.q_lora_rank)
    if not config.is_moe_layer(layer):
        shapes.update(_mlp("mlp.", config.intermediate_size, hidden))
        return {name: TensorSpec(shape) for name, shape in shapes.items()}
    shapes["mlp.gate.weight"] = (config.num_experts, hidden)
    if config.num_shared_experts:
        width = config.num_shared_experts * config.moe_intermediate_size
        shapes.update(_mlp("mlp.shared_experts.", width, hidden))
    specs = {name: TensorSpec(shape) for name, shape in shapes.items()}
    # Float32 at every publisher: rounded to bf16 it would choose other experts.
    specs["mlp.gate.e_score_correction_bias"] = TensorSpec((config.num_experts,), ("F32",))
    return specs


def drafter_tensors(config: DrafterConfig) -> dict[str, TensorSpec]:
    """Tensors of a DFlash drafter's layers, under z-lab's names and without `model.`."""
    hidden, dim = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.tap_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        attention = prefix + "self_attn."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[attention + "q_proj.weight"] = (config.num_heads * dim, hidden)
        shapes[attention + "k_proj.weight"] = (config.num_kv_heads * dim, hidden)
        shapes[attention + "v_proj.weight"] = (config.num_kv_heads * dim, hidden)
        shapes[attention + "o_proj.weight"] = (hidden, config.num_heads * dim)
        shapes[attention + "q_norm.weight"] = (dim,)
        shapes[attention + "k_norm.weight"] = (dim,)
        shapes.update(_mlp(prefix + "mlp.", config.intermediate_size, hidden))
    return {name: TensorSpec(shape) for name, shape in shapes.items()}


def drafter_vocabulary(config: DrafterConfig) -> dict[str, TensorSpec]:
    """What a DFlash drafter may hold besides: an embedding and a head of its own, and which token
    each row of the head stands for, as an offset to its id (d2t) and as a set (t2d).
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    drafted = config.draft_vocab_size or vocab
    return {
        EMBED_TOKENS: TensorSpec((vocab, hidden)),
        LM_HEAD: TensorSpec((drafted, hidden)),
        DRAFT_TO_TARGET: TensorSpec((drafted,), ("I64", "I32")),
        TARGET_TO_DRAFT: TensorSpec((vocab,), ("BOOL",)),
    }


def drafter_name(stored: str) -> str:
    """z-lab's name of a drafter's tensor: without `model.`, and TorchSpec's names translated."""
    name = stored.removeprefix("model.")
    module, dot, rest = name.partition(".")
    return TORCHSPEC_NAMES.get(module, module) + dot + rest


def skipped_kind(name: str, config: ModelConfig) -> str | None:
    """Why canonical `name` is of no use to the text model, or None if it may be of use."""
    if name.startswith(VISION_PREFIXES):
        return "vision"
    match = _LAYER.match(name)
    if match and config.num_layers <= int(match[1]) < config.num_layers + config.num_mtp_layers:
        return "mtp"
    if name.endswith(".rotary_emb.inv_freq"):
        return "buffer"
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return "tied"
    return None


PARTS = (
    "embedding and head",
    "attention",
    "dense MLP",
    "router",
    "shared experts",
    "routed experts",
    "norms",
    "skipped",
)
"""What `part_of` tells apart."""


def part_of(name: str, config: ModelConfig) -> str:
    """Which of PARTS a canonical tensor name belongs to."""
    if skipped_kind(name, config):
        return "skipped"
    if name.endswith("norm.weight"):
        return "norms"
    for part, mark in (
        ("attention", ".self_attn."),
        ("routed experts", ".mlp.experts."),
        ("shared experts", ".mlp.shared_experts."),
        ("router", ".mlp.gate."),
        ("dense MLP", ".mlp."),
    ):
        if mark in name:
            return part
    return "embedding and head"


_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def _mlp(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
