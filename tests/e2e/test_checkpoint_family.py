"""FP8 folders, K2, K2-Thinking and DeepSeek-V3's routing: logits against transformers, float32."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_tools import (
    CheckpointMaker,
    copy,
    edit,
    read_json,
    replace_tensors,
    stored_tensors,
)
from oracles import transformers_logits
from safetensors.torch import save_file
from torch import Tensor

from kdtree_engine import LLM
from kdtree_engine.checkpoints import open_model
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.checkpoints.write import write_model
from kdtree_engine.kernels.router import RouterSettings, route

TOLERANCE = 1e-4  # absolute; logits have a spread of about 1
LENGTH = 200  # past a page and the original YaRN length

# transformers takes a block's size from the number of scales: right for whole blocks, and for
# weights that do not fill one.
WHOLE = Dims(
    hidden_size=256,
    q_lora_rank=128,
    kv_lora_rank=64,
    intermediate_size=384,
    moe_intermediate_size=128,
    nope_dim=32,
    rope_dim=32,
    v_dim=32,
)
# Partial blocks in every weight but none of 128 or less: 144 kv_a rows, 320 and 160 inner ones.
PARTIAL = Dims(
    hidden_size=192,
    num_heads=6,
    q_lora_rank=136,
    kv_lora_rank=136,
    intermediate_size=320,
    moe_intermediate_size=160,
    nope_dim=24,
    v_dim=40,
)

Case = tuple[str, dict[str, Any]]

CASES: dict[str, Case] = {
    "v3-fp8": ("deepseek-v3", {"form": "fp8", "dims": WHOLE}),
    "v3-fp8-small": ("deepseek-v3", {"form": "fp8", "seed": 1, "dims": Dims(q_lora_rank=None)}),
    "k2-fp8": ("k2", {"seed": 2, "dims": WHOLE, "max_file_bytes": 900_000}),
    "k2.6-fp8": ("k2.6", {"form": "fp8", "seed": 3, "dims": WHOLE}),
    "k2-bf16": ("k2", {"form": "bf16", "seed": 4}),
    "k2-thinking-int4": ("k2-thinking", {"seed": 5, "max_file_bytes": 90_000}),
    "v3-int4": ("deepseek-v3", {"form": "int4", "seed": 6}),
}
PARTIAL_CASES: dict[str, Case] = {
    "k2": ("k2", {"seed": 7, "dims": PARTIAL}),
    "v3-no-q-lora": (
        "deepseek-v3",
        {"form": "fp8", "seed": 8, "dims": Dims(**{**vars(PARTIAL), "q_lora_rank": None})},
    ),
}


def prompt(seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(160) for _ in range(LENGTH)]


def engine_logits(folder: Path, ids: list[int], dtype: str = "float32") -> Tensor:
    llm = LLM(folder, drafter="none", device="cpu", dtype=dtype, prefill_chunk=70)
    return llm.logits(ids)


def worst(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).abs().max())


def make_dense(folder: Path, to: Path, block: int = 128) -> Path:
    """The same model unquantised in float32: NumPy, each scale repeated over its block."""
    tensors = stored_tensors(folder)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale = tensors.pop(name).numpy()
        weight = tensors[name.removesuffix("_scale_inv")].float().numpy()
        rows, columns = weight.shape
        spread = np.repeat(np.repeat(scale, block, axis=0)[:rows], block, axis=1)[:, :columns]
        tensors[name.removesuffix("_scale_inv")] = torch.from_numpy(weight * spread)
    config = read_json(folder) | {"dtype": "float32"}
    del config["quantization_config"]
    write_model(to, config, {name: value.float() for name, value in tensors.items()})
    return to


@pytest.mark.parametrize("name", CASES)
def test_transformers_own_reading(name: str, checkpoint: CheckpointMaker) -> None:
    family, options = CASES[name]
    folder = checkpoint(family, **options)
    assert (len(list(folder.glob("*.safetensors"))) > 2) == ("max_file_bytes" in options)
    ids = prompt()
    want = transformers_logits(folder, ids, family)
    assert 0.5 < float(want.std()) < 2.0
    assert worst(engine_logits(folder, ids), want) < TOLERANCE


@pytest.mark.parametrize("name", PARTIAL_CASES)
def test_partial_blocks(name: str, checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    family, options = PARTIAL_CASES[name]
    folder = checkpoint(family, **options)
    ids = prompt(1)
    want = transformers_logits(make_dense(folder, tmp_path / "dense"), ids, family)
    assert 0.5 < float(want.std()) < 2.0
    assert worst(engine_logits(folder, ids), want) < TOLERANCE


def test_bfloat16_rounds_the_product_once(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """In bf16 the weights are bf16(q x scale): the very bits of such a folder stored dense."""
    folder = checkpoint("k2", seed=7, dims=PARTIAL)
    dense = make_dense(folder, tmp_path / "dense")
    ids = prompt(2)
    got = engine_logits(folder, ids, "bfloat16")
    assert torch.equal(got, engine_logits(dense, ids, "bfloat16"))


def test_scales_in_another_file(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder = checkpoint("k2", seed=7, dims=PARTIAL)
    tensors = stored_tensors(folder)
    apart = dict(sorted(tensors.items(), key=lambda item: item[0].endswith("_scale_inv")))
    write_model(tmp_path / "m", read_json(folder), apart, max_file_bytes=600_000)
    files = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())["weight_map"]
    scales = [name for name in files if name.endswith("_scale_inv")]
    split = [name for name in scales if files[name] != files[name.removesuffix("_scale_inv")]]
    assert len(split) > 0.9 * len(scales) > 50
    ids = prompt(3)
    assert torch.equal(engine_logits(tmp_path / "m", ids), engine_logits(folder, ids))


def shifted(folder: Path, to: Path, shift: float) -> Path:
    """A copy whose router biases are all lower by `shift`, as little spread as their rounding."""
    copied = copy(folder, to)
    name = "gate.e_score_correction_bias"
    biases = {n: t for n, t in stored_tensors(folder).items() if n.endswith(name)}
    replace_tensors(copied, {n: t - shift for n, t in biases.items()})
    return copied


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_groups_with_negative_scores(
    form: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Every score + bias is negative: groups left out, masked with 0, would win."""
    dims = Dims(num_experts=16, num_groups=4, top_groups=2, experts_per_token=3, q_lora_rank=None)
    folder = checkpoint("deepseek-v3", form=form, seed=9, dims=dims)
    lower = shifted(folder, tmp_path / "lower", 5.0)
    bias = open_model(lower).tensor("model.layers.2.mlp.gate.e_score_correction_bias")
    assert float(bias.max()) < -1.0  # a sigmoid adds less than 1
    ids = prompt(4)
    got = engine_logits(lower, ids)
    assert worst(got, transformers_logits(lower, ids, "deepseek-v3")) < TOLERANCE
    # The same choices as with the biases where they were: all of them moved alike.
    assert worst(got, engine_logits(folder, ids)) < TOLERANCE


def test_masking_with_zero_would_choose_others() -> None:
    """What the test above relies on: the choice of a mask of 0 is another one."""
    scores = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    bias = torch.full((16,), -5.0)
    chosen, _ = route(scores, bias, RouterSettings(3, 4, 2, True, 2.5))
    choice = (scores.sigmoid() + bias).view(50, 4, 4)
    kept = choice.topk(2).values.sum(-1).topk(2).indices
    alive = torch.zeros(50, 4).scatter_(1, kept, 1.0).bool()
    zeroed = choice.masked_fill(~alive[..., None], 0.0).flatten(1).topk(3).indices
    dropped = choice.masked_fill(~alive[..., None], -torch.inf).flatten(1).topk(3).indices
    assert torch.equal(chosen.long().sort().values, dropped.sort().values)
    assert not torch.equal(dropped.sort().values, zeroed.sort().values)


def transposed_scales(scale: Tensor) -> Tensor:
    return scale.T.contiguous().view(scale.shape)


def first_scales(scale: Tensor) -> Tensor:
    return scale[:1, :1].expand_as(scale).contiguous()


@pytest.mark.parametrize("mistake", [torch.reciprocal, transposed_scales, first_scales])
def test_the_tolerance_shows_mistakes(
    mistake: Callable[[Tensor], Tensor], checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Scales that divide, or that belong to other blocks, move the logits by far more."""
    folder = checkpoint("k2", seed=7, dims=PARTIAL)
    wrong = copy(folder, tmp_path / "wrong")
    tensors = stored_tensors(folder)
    scales = {n: mistake(t) for n, t in tensors.items() if n.endswith("kv_b_proj.weight_scale_inv")}
    replace_tensors(wrong, scales)
    ids = prompt(5)
    assert worst(engine_logits(wrong, ids), engine_logits(folder, ids)) > 100 * TOLERANCE


def test_a_module_left_dense(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """The form is each module's own: one attention and one expert weight unquantised."""
    folder = checkpoint("k2", seed=7, dims=PARTIAL)
    mixed = copy(folder, tmp_path / "mixed")
    tensors = stored_tensors(folder)
    dense = stored_tensors(make_dense(folder, tmp_path / "dense"))
    modules = ("model.layers.1.self_attn.kv_b_proj", "model.layers.2.mlp.experts.3.up_proj")
    for module in modules:
        del tensors[f"{module}.weight_scale_inv"]
        tensors[f"{module}.weight"] = dense[f"{module}.weight"]
    save_file(tensors, str(mixed / "model.safetensors"))
    assert open_model(mixed).experts(2).form(3, "up_proj") == "dense"
    assert open_model(mixed).experts(2).form(3, "gate_proj") == "fp8"
    ids = prompt(6)
    assert torch.equal(engine_logits(mixed, ids), engine_logits(folder, ids))


def test_top_level_and_nested_quantization(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """K2.5's config with FP8: `quantization_config` inside text_config, or beside it."""
    folder = checkpoint("k2.6", form="fp8", seed=3, dims=WHOLE)
    outside = copy(folder, tmp_path / "outside")
    section = read_json(folder)["text_config"]["quantization_config"]
    edit(outside, {"quantization_config": section, "text_config.quantization_config": None})
    assert open_model(folder).config == open_model(outside).config
    assert open_model(folder).config.quantization == "fp8"
