"""llm.logits against code nobody here wrote (transformers), and against the maths (golden)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import (
    CheckpointMaker,
    copy,
    edit,
    golden_inputs,
    replace_tensors,
    stored_tensors,
)
from oracles import transformers_logits
from torch import Tensor

from golden import model as golden
from kdtree_engine import LLM
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.engine.build import packaged_model
from kdtree_engine.kernels.int4 import quantise

TOLERANCE = 1e-4  # absolute against transformers, logits of spread 1; times the spread elsewhere
LENGTH = 600  # past the original YaRN length (64), a page (64), a block (512) and the chunk
CHUNK = 150

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "k2.6-int4-yarn": ("k2.6", {}),
    "k2.6-int4-yarn-sharded": ("k2.6", {"seed": 1, "max_file_bytes": 90_000}),
    "k2.6-int4-plain": ("k2.6", {"seed": 2, "dims": Dims(yarn_factor=None)}),
    "k2.6-int4-wide": (
        "k2.6",
        {"seed": 3, "dims": Dims(hidden_size=96, moe_intermediate_size=64, v_dim=24, num_heads=6)},
    ),
    "k2.6-int4-long-ramp": (
        "k2.6",
        {"seed": 9, "dims": Dims(rope_dim=32, yarn_factor=8.0, yarn_original=256)},
    ),
    "v3-bf16-yarn-groups": ("deepseek-v3", {"seed": 4}),
    "v3-bf16-yarn-sharded": ("deepseek-v3", {"seed": 5, "max_file_bytes": 90_000}),
    "v3-bf16-plain-no-q-lora": (
        "deepseek-v3",
        {"seed": 6, "dims": Dims(yarn_factor=None, q_lora_rank=None, experts_per_token=3)},
    ),
    "v3-bf16-two-shared": ("deepseek-v3", {"seed": 7, "dims": Dims(num_shared_experts=2)}),
}
BY_CHECKPOINT = pytest.mark.parametrize("name", CHECKPOINTS)


def prompt(vocab: int, length: int = LENGTH, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(length)]


def engine_logits(folder: Path, ids: list[int], chunk: int = CHUNK) -> Tensor:
    llm = LLM(folder, drafter="none", device="cpu", prefill_chunk=chunk)
    logits = llm.logits(ids)
    llm.engine.check_integrity()
    assert logits.dtype == torch.float32
    return logits


def golden_logits(folder: Path, ids: list[int]) -> Tensor:
    return torch.from_numpy(golden.forward(*golden_inputs(folder), ids).logits)


def worst(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).abs().max())


@BY_CHECKPOINT
def test_transformers(name: str, checkpoint: CheckpointMaker) -> None:
    family, options = CHECKPOINTS[name]
    folder = checkpoint(family, **options)
    assert (len(list(folder.glob("*.safetensors"))) > 4) == ("sharded" in name)
    ids = prompt(160)
    want = transformers_logits(folder, ids, family)
    assert 0.5 < float(want.std()) < 2.0
    assert worst(engine_logits(folder, ids), want) < TOLERANCE


@BY_CHECKPOINT
def test_golden(name: str, checkpoint: CheckpointMaker) -> None:
    family, options = CHECKPOINTS[name]
    folder = checkpoint(family, **options)
    ids = prompt(160, seed=1)
    want = golden_logits(folder, ids)
    assert worst(engine_logits(folder, ids), want) < TOLERANCE * float(want.std())


def test_golden_of_nearly_flat_logits(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("k2.6", seed=8, logit_std=0.01)
    ids = prompt(160, length=140)
    want = golden_logits(folder, ids)
    assert 0.005 < float(want.std()) < 0.02
    assert worst(engine_logits(folder, ids), want) < TOLERANCE * float(want.std())


def test_int4_as_compressed_tensors_writes_it(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Their own compressor's words and int64 shapes, read by us and by transformers."""
    pytest.importorskip("compressed_tensors", reason="the oracle needs compressed-tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor as Packer
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    folder = copy(checkpoint("k2.6"), tmp_path / "model")
    before, changes = stored_tensors(folder), {}
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in before if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        rows, words = before[name].shape
        weight = torch.randn(rows, words * 8, generator=generator) * (words * 8) ** -0.5
        packed = Packer.compress({"weight": weight, "weight_scale": quantise(weight).scale}, scheme)
        changes |= {f"{module}.{part}": value for part, value in packed.items()}
    replace_tensors(folder, changes)
    ids = prompt(160, length=150)
    got = engine_logits(folder, ids)
    assert worst(got, transformers_logits(folder, ids, "k2.6")) < TOLERANCE
    assert worst(got, engine_logits(checkpoint("k2.6"), ids)) > 0.1  # other weights, other logits


def test_the_packaged_model() -> None:
    folder = packaged_model() / "target"
    ids = prompt(2816)
    got = engine_logits(folder, ids)
    assert worst(got, transformers_logits(folder, ids, "k2.6")) < TOLERANCE
    want = golden_logits(folder, ids[:150])
    assert worst(got[:150], want) < TOLERANCE * float(want.std())


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_do_not_show(chunk: int, checkpoint: CheckpointMaker) -> None:
    """Not even in the last bit."""
    folder, ids = checkpoint("k2.6"), prompt(160, length=90 if chunk == 1 else LENGTH)
    assert torch.equal(engine_logits(folder, ids, chunk), engine_logits(folder, ids, 1000))


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "theta": ("deepseek-v3", {"rope_theta": 11000.0}),
    "yarn factor": ("deepseek-v3", {"rope_scaling.factor": 60.0}),
    "yarn original length": (
        "deepseek-v3",
        {"rope_scaling.original_max_position_embeddings": 8192},
    ),
    "softmax scale": ("deepseek-v3", {"rope_scaling.mscale_all_dim": 0.9}),
    "routed scaling": ("deepseek-v3", {"routed_scaling_factor": 2.51}),
    "groups kept": ("deepseek-v3", {"topk_group": 4}),
    "no groups": ("deepseek-v3", {"n_group": 1, "topk_group": 1}),
    "not normalised": ("deepseek-v3", {"norm_topk_prob": False}),
    "eps": ("deepseek-v3", {"rms_norm_eps": 1e-3}),
    "k2.6 routed scaling": ("k2.6", {"text_config.routed_scaling_factor": 2.83}),
    "k2.6 experts chosen": ("k2.6", {"text_config.num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_tolerance_shows_mistakes(
    mistake: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """A config read wrongly moves the logits by far more than the oracles' tolerance."""
    family, change = MISTAKES[mistake]
    folder = checkpoint(family, **({"seed": 4} if family == "deepseek-v3" else {}))
    wrong = copy(folder, tmp_path / "wrong")
    edit(wrong, change)
    ids = prompt(160, length=130)
    assert worst(engine_logits(wrong, ids), engine_logits(folder, ids)) > 10 * TOLERANCE
