"""Write model folders: any tensors with their config, and small random checkpoints.

`write_model` is what recipes use; `make_checkpoint` draws a random model (and a random DFlash
drafter) in exactly the published formats, so that tests and other engines can load it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kdtree_engine.checkpoints import templates
from kdtree_engine.checkpoints.drafter_config import check_drafter, parse_drafter_config
from kdtree_engine.checkpoints.model_config import (
    CONFIG_FILE,
    GENERATION_FILE,
    TEMPLATE_FILE,
    parse_model_config,
)
from kdtree_engine.checkpoints.names import (
    DRAFT_TO_TARGET,
    EMBED_TOKENS,
    LM_HEAD,
    PROJECTIONS,
    TARGET_TO_DRAFT,
    drafter_tensors,
    expected_tensors,
    expert_module,
    expert_modules,
    expert_shape,
    layer_tensors,
    projection_of,
)
from kdtree_engine.checkpoints.quantization import (
    FP8,
    INT4,
    PACKED,
    SCALE,
    SCALE_INV,
    SHAPE,
    WEIGHT,
)
from kdtree_engine.checkpoints.reader import INDEX_FILE, SINGLE_FILE
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.config import DrafterConfig, ModelConfig
from kdtree_engine.errors import CheckpointError, OptionError
from kdtree_engine.kernels.fp8 import BLOCK, blocks_of, quantize
from kdtree_engine.kernels.int4 import quantise

HEADER_BYTES = 160
"""At most this much of a file's header goes to one tensor, besides its name."""


def write_model(
    folder: str | PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    generation_config: Mapping[str, Any] | None = None,
    max_file_bytes: int | None = None,
    template: str | None = None,
) -> None:
    """Write a model or drafter folder: config.json, the tensors under the names given and perhaps a
    chat template.

    No weight file exceeds `max_file_bytes`, header included: several become shards with an index,
    in the order of `tensors`. CheckpointError if the folder holds a model already, cannot be
    written, or if one tensor alone is too large.
    """
    path = Path(folder)
    shards = _shards(tensors, max_file_bytes)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / CONFIG_FILE).exists() or any(path.glob("*.safetensors*")):
            raise CheckpointError(f"{path}: holds a model already; choose another folder")
        _write_weights(path, tensors, shards)
        if generation_config is not None:
            _write_json(path / GENERATION_FILE, generation_config)
        if template is not None:
            (path / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        _write_json(path / CONFIG_FILE, config)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error


def make_checkpoint(
    folder: str | PathLike[str],
    family: str = templates.K26,
    seed: int = 0,
    drafter: bool = False,
    dims: Dims | None = None,
    logit_std: float = 1.0,
    max_file_bytes: int | None = None,
    form: str | None = None,
    layout: str = templates.ZLAB,
) -> None:
    """Write a random target of `family`, one of templates.FAMILIES, into `folder`.

    `form` is "bf16", "int4" or "fp8"; None is what the family was published in, DeepSeek-V3 in
    bf16. With `drafter` also a random DFlash drafter into `folder`/drafter, in `layout` ("z-lab",
    or "speculators" with a head of its own and perhaps a reduced vocabulary). Weights are scaled so
    that activations and attention scores spread by about 1 and logits by about `logit_std` (0.01
    gives a nearly flat model, in which rounding decides between tokens). The same arguments give
    the same bytes. OptionError for an unknown family, form or layout, ConfigError for sizes that do
    not fit together.
    """
    for what, name, known in (
        ("checkpoint family", family, templates.FAMILIES),
        ("checkpoint format", form, (None, *templates.FORMATS)),
        ("drafter layout", layout, templates.LAYOUTS),
    ):
        if name not in known:
            there = ", ".join(filter(None, known))
            raise OptionError(f"no {what} {name!r}; there are: {there}")
    dims = dims or Dims()
    generator = torch.Generator().manual_seed(seed)
    data = templates.model_template(family, dims, form)
    config = parse_model_config(data, str(Path(folder) / CONFIG_FILE))
    generation = templates.generation_template(family, dims)
    tensors = random_tensors(config, generator, logit_std)
    template = templates.THINKING_TEMPLATE if family == templates.K2_THINKING else None
    if not drafter:
        write_model(folder, data, tensors, generation, max_file_bytes, template)
        return
    home = Path(folder) / "drafter"
    draft_data = templates.drafter_template(dims, config.rope.theta, layout)
    draft_config = parse_drafter_config(draft_data, str(home / CONFIG_FILE))
    check_drafter(draft_config, config)
    specs = drafter_tensors(draft_config)
    draft = {name: _draw(name, spec.shape, generator) for name, spec in specs.items()}
    if layout == templates.SPECULATORS:
        draft |= _drafter_vocabulary(draft_config, generator, logit_std)
        embedding = config.tensor_prefix + "model." + EMBED_TOKENS
        draft[EMBED_TOKENS] = tensors[embedding]  # as their training saved it at first
    write_model(folder, data, tensors, generation, max_file_bytes, template)
    write_model(home, draft_data, draft, None, max_file_bytes)


def _drafter_vocabulary(
    config: DrafterConfig, generator: torch.Generator, logit_std: float
) -> dict[str, Tensor]:
    """A drafter's own head, and where the vocabulary is reduced the maps of its ids."""
    drafted = config.draft_vocab_size or config.vocab_size
    head = _draw(LM_HEAD, (drafted, config.hidden_size), generator, logit_std)
    if not config.reduced:
        return {LM_HEAD: head}
    tokens = torch.randperm(config.vocab_size, generator=generator)[:drafted].sort().values
    members = torch.zeros(config.vocab_size, dtype=torch.bool)
    members[tokens] = True
    offsets = tokens - torch.arange(drafted)
    return {LM_HEAD: head, DRAFT_TO_TARGET: offsets, TARGET_TO_DRAFT: members}


def random_tensors(
    config: ModelConfig, generator: torch.Generator, logit_std: float = 1.0
) -> dict[str, Tensor]:
    """Random tensors of a whole target under stored names: vision and MTP layers included."""
    tensors: dict[str, Tensor] = {}
    for name, spec in expected_tensors(config, experts=False).items():
        tensors.update(_stored(name, spec.shape, config, generator, logit_std))
    for module, shape in expert_modules(config):
        tensors.update(_expert(module, shape, config, generator))
    for layer in range(config.num_layers, config.num_layers + config.num_mtp_layers):
        tensors.update(_mtp_layer(layer, config, generator))
    tensors = {config.tensor_prefix + name: tensor for name, tensor in tensors.items()}
    if config.family == "k2.5":
        for name, size in _vision_shapes(config.hidden_size).items():
            tensors[name] = _draw(name, size, generator)
    return tensors


def _draw(
    name: str, shape: tuple[int, ...], generator: torch.Generator, logit_std: float = 1.0
) -> Tensor:
    """One random tensor, bf16 (the router's bias float32), scaled by what its name stands for."""
    values = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return values * 0.3  # some choices hinge on it, and some scores + bias fall below zero
    if len(shape) == 1:
        values = values * 0.1 + (0.0 if name.endswith(".bias") else 1.0)  # norms stay near 1
    elif name == "lm_head.weight":
        values = values * (logit_std * shape[-1] ** -0.5)
    elif not name.endswith("embed_tokens.weight"):
        values = values * shape[-1] ** -0.5  # keeps the spread of what it multiplies
    return values.to(torch.bfloat16)


def _stored(
    name: str,
    shape: tuple[int, ...],
    config: ModelConfig,
    generator: torch.Generator,
    logit_std: float = 1.0,
) -> dict[str, Tensor]:
    """One random tensor besides routed experts, in FP8 where the config declares it."""
    weight = _draw(name, shape, generator, logit_std)
    module = projection_of(name)
    if config.quantization != FP8 or module is None:
        return {name: weight}
    return _in_blocks(module, weight.float(), generator)


def _in_blocks(module: str, weight: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """`weight` [out, in] as FP8, its blocks' scales spread, so that a wrong block shows.

    Each block is multiplied by some value between a half and 2.
    """
    rows, columns = weight.shape
    factors = 2.0 ** (2.0 * torch.rand(blocks_of(rows, columns), generator=generator) - 1.0)
    by_row = factors.repeat_interleave(BLOCK, dim=0)[:rows]
    values, scales = quantize(weight * by_row.repeat_interleave(BLOCK, dim=1)[:, :columns])
    return {module + WEIGHT: values, module + SCALE_INV: scales}


def _expert(
    module: str, shape: tuple[int, int], config: ModelConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """One projection of a routed expert, in the form that the config declares."""
    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    if config.quantization == FP8:
        return _in_blocks(module, weight, generator)
    if config.quantization != INT4:
        return {module + WEIGHT: weight.to(torch.bfloat16)}
    packed, scale = quantise(weight)
    size = torch.tensor(shape, dtype=torch.int32)
    return {module + PACKED: packed, module + SCALE: scale, module + SHAPE: size}


def _mtp_layer(layer: int, config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """A multi-token-prediction layer: a decoder layer and what joins it to the model."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
    }
    shapes.update((name, spec.shape) for name, spec in layer_tensors(config, layer).items())
    prefix = f"model.layers.{layer}."
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensors.update(_stored(prefix + name, shape, config, generator))
    if config.is_moe_layer(layer):
        for expert in range(config.num_experts):
            for projection in PROJECTIONS:
                module = expert_module(layer, expert, projection)
                size = expert_shape(config, projection)
                tensors.update(_expert(module, size, config, generator))
    return tensors


def _vision_shapes(text_hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of the tiny vision tower and projector, under K2.6's names."""
    wide, grid, patch = templates.VISION_HIDDEN, templates.VISION_GRID, templates.VISION_PATCH
    merged = 4 * wide  # two by two patches
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (wide, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (wide,),
        "vision_tower.patch_embed.pos_emb.weight": (grid, grid, wide),
    }

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (rows, columns), (rows,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (wide,), (wide,)

    for block in range(templates.VISION_LAYERS):
        prefix = f"vision_tower.encoder.blocks.{block}."
        norm(prefix + "norm0")
        norm(prefix + "norm1")
        linear(prefix + "wqkv", 3 * wide, wide)
        linear(prefix + "wo", wide, wide)
        linear(prefix + "mlp.fc0", wide, wide)
        linear(prefix + "mlp.fc1", wide, wide)
    norm("vision_tower.encoder.final_layernorm")
    norm("mm_projector.pre_norm")
    linear("mm_projector.proj.0", merged, merged)
    linear("mm_projector.proj.2", text_hidden, merged)
    return shapes


def _shards(tensors: Mapping[str, Tensor], limit: int | None) -> list[list[str]]:
    """Names file by file, in order, so that no file exceeds `limit` bytes."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, tensor in tensors.items():
        need = tensor.nbytes + len(name.encode()) + HEADER_BYTES
        if limit is not None and room is not None:
            if need > limit - HEADER_BYTES:
                raise CheckpointError(f"{name} takes {need} bytes, over {limit} bytes a file")
            if need > room - HEADER_BYTES:
                shards.append([])
                room = limit
            room -= need
        shards[-1].append(name)
    return shards


def _write_weights(path: Path, tensors: Mapping[str, Tensor], shards: list[list[str]]) -> None:
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        if len(shards) == 1:
            file = SINGLE_FILE
        part = {name: tensors[name].contiguous() for name in names}
        save_file(part, str(path / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(path / INDEX_FILE, index)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
