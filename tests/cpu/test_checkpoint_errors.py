"""Wrong model folders: each gives one clear line, of the right kind, that names what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdtree_engine.checkpoints import open_drafter, open_model
from kdtree_engine.checkpoints.load_drafter import draft_tokens
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.checkpoints.write import make_checkpoint, write_model
from kdtree_engine.errors import (
    CheckpointError,
    ConfigError,
    DrafterError,
    KDTreeError,
    OptionError,
)

GATE = "language_model.model.layers.1.mlp.experts.3.gate_proj"
NORM = "language_model.model.norm.weight"
BIAS = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good K2.6 folder with a drafter; one weight file."""
    make_checkpoint(tmp_path / "model", "k2.6", drafter=True)
    return tmp_path / "model"


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """A good K2 folder in FP8, with partial blocks; one weight file."""
    make_checkpoint(tmp_path / "fp8", "k2", dims=Dims(hidden_size=160))
    return tmp_path / "fp8"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good K2.6 folder of several shards."""
    make_checkpoint(tmp_path / "sharded", "k2.6", max_file_bytes=100_000)
    return tmp_path / "sharded"


def fails(
    kind: type[KDTreeError], folder: Path, *parts: str, opener: Callable[[Path], Any] = open_model
) -> None:
    """Opening `folder` raises exactly `kind`, with one line that has all `parts` in it."""
    with pytest.raises(KDTreeError) as caught:
        opener(folder)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert "\n" not in message
    assert len(message) < 1000
    for part in (*parts, str(folder.parent)):
        assert part in message, message


def edit_json(path: Path, *keys: str, value: Any = None) -> None:
    """Set the value under nested `keys`; None removes it."""
    data = json.loads(path.read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner.pop(keys[-1], None)
    if value is not None:
        inner[keys[-1]] = value
    path.write_text(json.dumps(data))


def edit_tensors(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Set tensors of a folder with one weight file; None removes one."""
    path = str(folder / "model.safetensors")
    tensors: dict[str, Tensor | None] = {**load_file(path), **change}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def test_missing_things(folder: Path, sharded: Path, tmp_path: Path) -> None:
    fails(CheckpointError, tmp_path / "nowhere", "no such folder")
    fails(CheckpointError, folder / "config.json", "is a file, expected a model folder")
    (folder / "config.json").rename(tmp_path / "config.json")
    fails(ConfigError, folder, "config.json: no such file")
    (sharded / "model-00002-of-000006.safetensors").unlink()
    fails(CheckpointError, sharded, "1 of 6 shards are missing: model-00002-of-000006.safetensors")
    (sharded / INDEX).unlink()
    fails(CheckpointError, sharded, f"but no {INDEX}")


def test_folders_without_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    fails(CheckpointError, folder, "holds no weights")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    fails(CheckpointError, folder, "pytorch_model.bin; only safetensors")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"[1]", "holds a list, expected a JSON object"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_broken_json(folder: Path, text: bytes, reason: str) -> None:
    for name in ("generation_config.json", "config.json"):
        (folder / name).write_bytes(text)
        fails(ConfigError, folder, name, reason)


TEXT = "text_config"
QUANT = (TEXT, "quantization_config")
ROPE = (TEXT, "rope_scaling")
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "norm_topk_prob",
    "routed_scaling_factor",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_config_without_a_key(folder: Path, key: str) -> None:
    edit_json(folder / "config.json", TEXT, key)
    fails(ConfigError, folder, "config.json", key, "is missing")


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        (("model_type",), "llama", "'llama'; supported: deepseek_v3, kimi_k2, kimi_k25"),
        (("model_type",), None, '"model_type" is missing'),
        (("architectures",), ["LlamaForCausalLM"], "supported"),
        ((TEXT,), None, '"text_config" is missing'),
        ((TEXT,), 3, "expected an object"),
        ((TEXT, "model_type"), "qwen3", "'qwen3'; supported: 'kimi_k2'"),
        ((TEXT, "hidden_size"), "64", "expected a whole number"),
        ((TEXT, "hidden_size"), True, "expected a whole number"),
        ((TEXT, "hidden_size"), 0, "at least 1"),
        ((TEXT, "hidden_size"), 72, "multiple of 32"),
        ((TEXT, "rms_norm_eps"), float("nan"), "positive number"),
        ((TEXT, "norm_topk_prob"), 1, "true or false"),
        ((TEXT, "scoring_func"), "softmax", "'softmax'; supported: 'sigmoid'"),
        ((TEXT, "num_key_value_heads"), 2, "supported: 4"),
        ((TEXT, "n_group"), 3, "8 experts do not divide into n_group 3"),
        ((TEXT, "topk_group"), 2, "exceeds n_group"),
        ((TEXT, "n_group"), 8, "at least 2 are needed"),
        ((TEXT, "num_experts_per_tok"), 9, "num_experts_per_tok 9"),
        ((TEXT, "qk_rope_head_dim"), 7, "is odd"),
        ((TEXT, "num_hidden_layers"), 10**9, "expected at most"),
        ((TEXT, "num_hidden_layers"), 4096, "promises 4096 layers"),
        ((TEXT, "n_routed_experts"), 10**8, "promises 100000000 experts"),
        ((TEXT, "max_position_embeddings"), 2**22 + 1, "expected at most 4194304"),
        ((TEXT, "rope_theta"), 1.0, "is 1, expected a number over 1"),
        ((TEXT, "rope_theta"), 0.5, "is 0.5, expected a number over 1"),
        ((*ROPE, "rope_theta"), 1, "is 1, expected a number over 1"),
        ((*ROPE, "beta_slow"), 1e-310, "expected 0.001 to 1,000,000"),
        ((*ROPE, "factor"), 1e-320, "expected 0.001 to 1,000,000"),
        ((TEXT, "rms_norm_eps"), 10**1000, "positive number"),
        ((*ROPE, "type"), "linear", "'linear'; supported: default, yarn"),
        ((*ROPE, "type"), None, '"text_config.rope_scaling.type" is missing'),
        ((*ROPE, "factor"), None, "factor"),
        ((*ROPE, "original_max_position_embeddings"), None, "is missing"),
        (
            (*QUANT, "quant_method"),
            "awq",
            "'awq'; supported: no quantization, compressed-tensors, fp8",
        ),
        ((*QUANT, "quant_method"), None, "quant_method"),
        ((*QUANT, "format"), "nvfp4-pack-quantized", "supported: 'pack-quantized'"),
        ((*QUANT, "config_groups", "group_0", "weights", "num_bits"), 8, "supported: 4"),
        ((*QUANT, "config_groups", "group_0", "weights", "group_size"), 128, "supported: 32"),
        ((*QUANT, "config_groups", "group_0", "weights", "actorder"), "group", "actorder"),
        ((*QUANT, "config_groups", "group_0", "input_activations"), {}, "activations"),
        ((*QUANT, "kv_cache_scheme"), {"num_bits": 8}, "cache"),
        (("eos_token_id",), "end", "eos_token_id"),
    ],
)
def test_config_with_a_wrong_value(
    folder: Path, keys: tuple[str, ...], value: Any, reason: str
) -> None:
    edit_json(folder / "config.json", *keys, value=value)
    kind = CheckpointError if "promises" in reason else ConfigError
    fails(kind, folder, keys[-1] if kind is ConfigError and len(keys) > 1 else "", reason)


@pytest.mark.parametrize("cut", [1, 5_000, 80_000, 10**9])
def test_truncated_files(folder: Path, sharded: Path, cut: int) -> None:
    for path in (folder / "model.safetensors", sharded / "model-00003-of-000006.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data[: max(len(data) - cut, 0)])
        fails(CheckpointError, path.parent, path.name, "truncated or not a safetensors file")


@pytest.mark.parametrize("change", ["lost", "no_map", "number", "escape", "absolute", "broken"])
def test_bad_index(sharded: Path, change: str) -> None:
    index = json.loads((sharded / INDEX).read_text())
    weight_map, reason = index["weight_map"], "weight_map"
    if change == "lost":
        weight_map[NORM] = "model-00006-of-000006.safetensors"
        reason = f"names tensors that their shards do not hold: {NORM} (model-00006"
    elif change == "no_map":
        del index["weight_map"]
    elif change == "number":
        weight_map[NORM] = 4
    elif change == "escape":
        weight_map[NORM] = "../model/model.safetensors"
        reason = "is not a plain file name"
    elif change == "absolute":
        weight_map[NORM] = "/etc/passwd"
        reason = "'/etc/passwd' is not a plain file name"
    text = json.dumps(index)
    if change == "broken":
        text, reason = text[:-10], "is not valid JSON"
    (sharded / INDEX).write_text(text)
    fails(CheckpointError, sharded, reason)


def test_links_out_of_the_folder(folder: Path, sharded: Path, tmp_path: Path) -> None:
    for path in (folder / "model.safetensors", sharded / "model-00001-of-000006.safetensors"):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
        fails(CheckpointError, path.parent, "is a link that leaves the folder", path.name)
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to("../config.json")
    fails(CheckpointError, folder, "is a link that leaves the folder", "config.json")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(KDTreeError):
        open_model(folder)


def test_a_link_inside_the_folder_is_fine(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    assert open_model(folder).config.num_layers == 4


def test_all_differences_in_one_line(folder: Path) -> None:
    wrong: dict[str, Tensor | None] = {
        NORM: torch.ones(63, dtype=torch.bfloat16),
        BIAS: torch.zeros(8, dtype=torch.bfloat16),
        "language_model.model.layers.9.input_layernorm.weight": torch.ones(64),
    }
    for layer in range(4):
        wrong[f"language_model.model.layers.{layer}.self_attn.o_proj.weight"] = None
    edit_tensors(folder, wrong)
    fails(
        CheckpointError,
        folder,
        "4 missing (model.layers.0.self_attn.o_proj.weight, ",
        "and 1 more)",
        "1 extra (model.layers.9.input_layernorm.weight)",
        "1 misshapen (model.norm.weight is [63], expected [64])",
        "1 wrongly typed (model.layers.1.mlp.gate.e_score_correction_bias is BF16, expected F32)",
    )


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("weight", torch.zeros(32, 64), "is stored twice, as weight and as weight_packed"),
        ("weight_packed", None, "has neither weight nor weight_packed"),
        ("weight_scale", None, "1 missing"),
        ("weight_shape", None, "1 missing"),
        ("weight_packed", torch.zeros(32, 4, dtype=torch.int32), "is [32, 4], expected [32, 8]"),
        ("weight_packed", torch.zeros(32, 8, dtype=torch.int64), "is I64, expected I32"),
        ("weight_scale", torch.zeros(32, 2), "is F32, expected BF16"),
        ("weight_zero_point", torch.zeros(4, 2), "1 extra"),
    ],
)
def test_bad_experts(folder: Path, part: str, value: Tensor | None, reason: str) -> None:
    edit_tensors(folder, {f"{GATE}.{part}": value})
    fails(CheckpointError, folder, reason, GATE.removeprefix("language_model."))


def test_one_tensor_under_two_names(folder: Path) -> None:
    edit_tensors(folder, {"model.norm.weight": torch.ones(64)})
    fails(CheckpointError, folder, "holds both", NORM)


def test_int4_where_it_is_not_expected(folder: Path) -> None:
    module = "language_model.model.layers.1.mlp.shared_experts.gate_proj.weight"
    words = torch.zeros(32, 8, dtype=torch.int32)
    edit_tensors(folder, {module: None, f"{module}_packed": words})
    fails(CheckpointError, folder, "only routed experts may be INT4")
    edit_json(folder / "config.json", *QUANT)
    fails(CheckpointError, folder, "gate_proj is INT4, but config.json declares no quantization")


UP = "model.layers.1.mlp.experts.3.up_proj"
Q_B = "model.layers.1.self_attn.q_b_proj"
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("fmt", "e5m2", "'e5m2'; supported: 'e4m3'"),
        ("activation_scheme", "static", "'static'; supported: 'dynamic'"),
        ("scale_fmt", "ue8m0", "'ue8m0'; supported: 'float'"),
        ("expert_dtype", "fp4", "'fp4'; supported: 'fp8'"),
        ("weight_block_size", [64, 128], "[64, 128]; supported: [128, 128]"),
        ("weight_block_size", None, "None; supported: [128, 128]"),
        ("weight_block_size", 128, "128; supported: [128, 128]"),
        ("kv_cache_scheme", {"num_bits": 8}, "a quantised cache is not supported"),
    ],
)
def test_fp8_variants(fp8: Path, key: str, value: Any, reason: str) -> None:
    edit_json(fp8 / "config.json", "quantization_config", key, value=value)
    fails(ConfigError, fp8, f'"quantization_config.{key}"', reason)


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        # Blocks as transformers, which divides rows by the number of scales, would have them.
        (
            {f"{UP}.weight_scale_inv": torch.ones(2, 1)},
            [f"1 misshapen ({UP}.weight_scale_inv is [2, 1], expected [1, 2])"],
        ),
        (
            {f"{Q_B}.weight_scale_inv": torch.ones(1)},
            [f"1 misshapen ({Q_B}.weight_scale_inv is [1], expected [1, 1])"],
        ),
        (
            {f"{Q_B}.weight_scale_inv": torch.ones(1, 1, dtype=torch.bfloat16)},
            [f"1 wrongly typed ({Q_B}.weight_scale_inv is BF16, expected F32)"],
        ),
        (
            {f"{UP}.weight_scale_inv": torch.ones(1, 2, dtype=torch.float8_e8m0fnu)},
            [f"1 wrongly typed ({UP}.weight_scale_inv is F8_E8M0, expected F32)"],
        ),
        (
            {f"{UP}.weight": torch.ones(32, 160).to(torch.float8_e5m2)},
            [f"1 wrongly typed ({UP}.weight is F8_E5M2, expected F8_E4M3)"],
        ),
        ({f"{UP}.weight": None}, [f"{UP} has weight_scale_inv, but no weight"]),
        ({f"{Q_B}.weight": None}, [f"1 missing ({Q_B}.weight)"]),
        (
            {f"{UP}.weight": None, f"{UP}.weight_scale_inv": None},
            [f"{UP} has neither weight nor weight_packed"],
        ),
        # FP8 values whose scales are lost are no dense weight.
        ({f"{UP}.weight_scale_inv": None}, [f"1 missing ({UP}.weight_scale_inv)"]),
        ({f"{Q_B}.weight_scale_inv": None}, [f"1 missing ({Q_B}.weight_scale_inv)"]),
        (
            {f"{UP}.weight_packed": torch.zeros(32, 20, dtype=torch.int32)},
            [f"{UP} is stored twice, as weight and as weight_packed"],
        ),
        (
            {
                f"{UP}.weight": None,
                f"{UP}.weight_packed": torch.zeros(32, 20, dtype=torch.int32),
            },
            [f"{UP} is stored twice, as weight_scale_inv and as weight_packed"],
        ),
        (
            {
                f"{UP}.weight": None,
                f"{UP}.weight_scale_inv": None,
                f"{UP}.weight_packed": torch.zeros(32, 20, dtype=torch.int32),
                f"{UP}.weight_scale": torch.zeros(32, 5, dtype=torch.bfloat16),
                f"{UP}.weight_shape": torch.tensor([32, 160]),
            },
            [f"{UP} is INT4, but config.json declares FP8 alone"],
        ),
        (
            {
                "model.layers.1.mlp.gate.weight": torch.ones(8, 160).to(E4M3),
                "model.layers.1.mlp.gate.weight_scale_inv": torch.ones(1, 2),
            },
            [
                "1 extra (model.layers.1.mlp.gate.weight_scale_inv)",
                "model.layers.1.mlp.gate.weight is F8_E4M3",
                "only projections may be FP8",
            ],
        ),
    ],
)
def test_bad_fp8_tensors(fp8: Path, change: dict[str, Tensor | None], reasons: list[str]) -> None:
    edit_tensors(fp8, change)
    fails(CheckpointError, fp8, *reasons)


def test_fp8_that_the_config_does_not_announce(fp8: Path) -> None:
    edit_json(fp8 / "config.json", "quantization_config")
    declared = "config.json declares no quantization"
    fails(CheckpointError, fp8, f"kv_a_proj_with_mqa is FP8, but {declared}", "104 contradictory")


def test_weight_shape_is_checked_when_read(folder: Path) -> None:
    edit_tensors(folder, {f"{GATE}.weight_shape": torch.tensor([32, 96])})
    experts = open_model(folder).experts(1)
    with pytest.raises(CheckpointError, match=r"weight_shape says \[32, 96\], expected \[32, 64\]"):
        experts.gate_up(3)


def test_asking_for_what_is_not_there(folder: Path) -> None:
    ckpt = open_model(folder)
    with pytest.raises(CheckpointError, match=r"holds no tensor model\.layers\.7\.x"):
        ckpt.tensor("model.layers.7.x")


@pytest.mark.parametrize(
    ("keys", "value", "kind", "reason"),
    [
        (("speculators_model_type",), "dflash", ConfigError, "transformer_layer_config"),
        (("speculators_model_type",), "eagle3", ConfigError, "is 'eagle3'; supported: 'dflash'"),
        (("sample_from_anchor",), True, ConfigError, "sample_from_anchor"),
        (("attention_sink_bias",), True, ConfigError, "attention_sink_bias"),
        (("draft_vocab_size",), 161, DrafterError, "draft_vocab_size 161 exceeds"),
        (("dflash_config", "use_swa"), True, ConfigError, "use_swa"),
        (("architectures",), ["LlamaForCausalLMEagle3"], ConfigError, "['DFlashDraftModel']"),
        (("architectures",), None, ConfigError, "is missing"),
        (("dflash_config",), None, ConfigError, "is missing"),
        (("dflash_config", "mask_token_id"), None, ConfigError, "mask_token_id"),
        (("dflash_config", "mask_token_id"), 160, DrafterError, "mask_token_id 160 is outside"),
        (("dflash_config", "target_layer_ids"), [0, 4], DrafterError, "[4] are outside"),
        (("dflash_config", "target_layer_ids"), None, DrafterError, "target_layer_ids []"),
        (("dflash_config", "block_size"), 4, ConfigError, "is 8, but dflash_config says 4"),
        (("dflash_config", "selector_rank"), 4, ConfigError, "DFlash 2"),
        (("dflash_config", "final_logit_softcapping"), 30.0, ConfigError, "final_logit"),
        (("block_size",), None, ConfigError, '"block_size" is missing'),
        (("block_size",), 1, DrafterError, "block_size 1"),
        (("num_target_layers",), None, ConfigError, "is missing"),
        (("head_dim",), 15, ConfigError, "even"),
        (("max_position_embeddings",), 2**31 - 1, ConfigError, "expected at most 4194304"),
        (("rope_theta",), 1.0, ConfigError, "is 1, expected a number over 1"),
        (("num_key_value_heads",), 3, ConfigError, "not a multiple"),
        (("layer_types",), ["full_attention"], ConfigError, "1 entries for 2 layers"),
        (("layer_types",), ["linear", "linear"], ConfigError, "'linear'; supported"),
        (("is_causal",), 1, ConfigError, "is_causal"),
        (("sliding_window_non_causal",), "no", ConfigError, "expected true or false"),
    ],
)
def test_bad_drafter_configs(
    folder: Path, keys: tuple[str, ...], value: Any, kind: type[KDTreeError], reason: str
) -> None:
    edit_json(folder / "drafter/config.json", *keys, value=value)
    fails(kind, folder / "drafter", "config.json", reason, opener=open_drafter)


def test_models_and_drafters_in_each_others_place(folder: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "other", drafter=True, layout="speculators")
    for drafter in (folder / "drafter", tmp_path / "other/drafter"):
        fails(ConfigError, drafter, "is a drafter, not a model; give it as --drafter")
    fails(ConfigError, folder, "is a model, not a drafter; give it as MODEL", opener=open_drafter)


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_sliding_layers_that_do_not_slide(tmp_path: Path, layout: str) -> None:
    """A window beside `use_sliding_window` false: readers differ in what that means."""
    dims = Dims(drafter_layer_types=("sliding_attention", "full_attention"))
    make_checkpoint(tmp_path, "k2.6", drafter=True, dims=dims, layout=layout)
    inner = ("transformer_layer_config",) if layout == "speculators" else ()
    path = tmp_path / "drafter/config.json"
    edit_json(path, *inner, "use_sliding_window", value=False)
    reason = "is false, but layer_types has sliding_attention"
    fails(ConfigError, path.parent, "use_sliding_window", reason, opener=open_drafter)
    edit_json(path, *inner, "use_sliding_window", value=None)
    open_drafter(path.parent)


def test_bad_drafter_tensors(folder: Path) -> None:
    drafter = folder / "drafter"
    edit_tensors(drafter, {"lm_head.weight": torch.zeros(96, 64)})
    fails(CheckpointError, drafter, "lm_head.weight is [96, 64]", "[160, 64]", opener=open_drafter)
    edit_tensors(drafter, {"lm_head.weight": None, "markov_head.weight": torch.zeros(1)})
    fails(CheckpointError, drafter, "1 extra (markov_head.weight)", opener=open_drafter)
    edit_tensors(drafter, {"markov_head.weight": None})
    edit_tensors(drafter, {"lm_head.weight": None, "fc.weight": torch.zeros(64, 64)})
    fails(CheckpointError, drafter, "is [64, 64], expected [64, 192]", opener=open_drafter)
    (drafter / "model.safetensors").write_bytes(b"")
    fails(CheckpointError, drafter, "truncated", opener=open_drafter)


@pytest.fixture
def speculator(tmp_path: Path) -> Path:
    """A drafter of 96 of 160 tokens in the speculators layout, one sliding layer."""
    dims = Dims(draft_vocab_size=96, drafter_layer_types=("sliding_attention", "full_attention"))
    make_checkpoint(tmp_path / "model", "k2.6", drafter=True, dims=dims, layout="speculators")
    return tmp_path / "model" / "drafter"


@pytest.mark.parametrize(
    ("keys", "value", "kind", "reason"),
    [
        (("aux_hidden_state_layer_ids",), [0, 2], ConfigError, "expected ids from 1 on"),
        (("aux_hidden_state_layer_ids",), None, DrafterError, "aux_hidden_state_layer_ids []"),
        (("aux_hidden_state_layer_ids",), [2, 2], DrafterError, "[2, 2] must be distinct"),
        (("draft_vocab_size",), None, ConfigError, '"draft_vocab_size" is missing'),
        (("draft_vocab_size",), 161, DrafterError, "161 exceeds the vocabulary of 160"),
        (("draft_vocab_size",), 97, CheckpointError, "d2t is [96], expected [97]"),
        (("draft_vocab_size",), 160, CheckpointError, "lm_head.weight is [96, 64], expected [160"),
        (("sliding_window_non_causal",), None, ConfigError, "readers disagree"),
        (("shift_label",), True, ConfigError, "shift_label"),
        (("projector_type",), "domino", ConfigError, "'domino'; supported: 'dflash'"),
        (("target_hidden_size",), 128, ConfigError, "is 128; supported: 64"),
        (("block_size",), 1, DrafterError, "block_size 1"),
        (("mask_token_id",), None, ConfigError, '"mask_token_id" is missing'),
        (("architectures",), ["Eagle3DraftModel"], ConfigError, "DFlashSpeculator"),
        (("transformer_layer_config", "model_type"), "gpt2", ConfigError, "'qwen3', 'llama'"),
        (("transformer_layer_config", "hc_mult"), 4, ConfigError, "hc_mult"),
        (("transformer_layer_config", "head_dim"), None, ConfigError, "_config.head_dim"),
    ],
)
def test_bad_speculators_configs(
    speculator: Path, keys: tuple[str, ...], value: Any, kind: type[KDTreeError], reason: str
) -> None:
    edit_json(speculator / "config.json", *keys, value=value)
    fails(kind, speculator, reason, opener=open_drafter)


def test_bad_vocabulary_maps(speculator: Path) -> None:
    """What a reduced vocabulary needs; the maps' values are checked by draft_tokens."""
    raw = load_file(str(speculator / "model.safetensors"))

    def check(changes: dict[str, torch.Tensor | None], *parts: str) -> None:
        edit_tensors(speculator, changes)
        fails(CheckpointError, speculator, *parts, opener=open_drafter)
        edit_tensors(speculator, {name: raw[name] for name in changes})

    check({"d2t": None}, "1 missing (d2t)", "draft_vocab_size 96", "a head of its own and d2t")
    check({"lm_head.weight": None, "d2t": None}, "2 missing (lm_head.weight, d2t)")
    check({"d2t": raw["d2t"].float()}, "d2t is F32, expected I64 or I32")
    check({"d2t": raw["d2t"] + 100}, "outside of the vocabulary of 160")
    check({"t2d": ~raw["t2d"]}, "d2t and t2d name different tokens (96 and 64)")
    check({"t2d": raw["t2d"].float()}, "t2d is F32, expected BOOL")
    check({"embed_tokens.weight": torch.zeros(96, 64)}, "embed_tokens.weight is [96, 64]")
    (speculator / "mask_embedding.pt").write_bytes(b"")
    fails(CheckpointError, speculator, "mask_embedding.pt", opener=open_drafter)


@pytest.mark.parametrize(
    ("tokens", "members", "reason"),
    [
        ([0, 3, 10], None, "draft id 2 to token 10, outside of the vocabulary of 10"),
        ([-1, 3, 5], None, "draft id 0 to token -1, outside"),
        ([3, 1, 5], None, "draft id 1 to token 1 and the one before it to 3; expected rising"),
        ([3, 3, 5], None, "draft id 1 to token 3 and the one before it to 3; expected rising"),
        ([1, 2, 5], [1, 2, 6], "d2t and t2d name different tokens (3 and 3)"),
    ],
)
def test_bad_draft_tokens(tokens: list[int], members: list[int] | None, reason: str) -> None:
    offsets = torch.tensor(tokens) - torch.arange(3)
    among = None if members is None else torch.tensor([one in members for one in range(10)])
    with pytest.raises(CheckpointError, match=re.escape(reason)) as caught:
        draft_tokens(offsets, among, 10, "here")
    assert str(caught.value).startswith("here: d2t") and "\n" not in str(caught.value)


def test_draft_tokens_of_absolute_ids_are_refused() -> None:
    """A map to ids instead of offsets is what one gets wrong; it leaves the vocabulary."""
    with pytest.raises(CheckpointError, match="expected offsets"):
        draft_tokens(torch.arange(0, 100, 2), None, 100, "here")


def test_a_raw_torchspec_config_is_refused(folder: Path) -> None:
    edit_json(folder / "drafter/config.json", "dflash_config", value=None)
    edit_json(folder / "drafter/config.json", "target_num_hidden_layers", value=4)
    fails(ConfigError, folder / "drafter", "TorchSpec's training config", opener=open_drafter)


def test_writing_refuses(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds a model already"):
        make_checkpoint(folder, "k2.6")
    with pytest.raises(OptionError, match=r"there are: k2\.6, deepseek-v3, k2, k2-thinking"):
        make_checkpoint(tmp_path / "x", "gpt")
    with pytest.raises(OptionError, match="there are: z-lab, speculators"):
        make_checkpoint(tmp_path / "x", "k2.6", drafter=True, layout="eagle")
    with pytest.raises(ConfigError, match="multiple of 32"):
        make_checkpoint(tmp_path / "x", "k2.6", dims=Dims(hidden_size=40))
    assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match="over 1000 bytes a file"):
        write_model(tmp_path / "x", {}, {"a": torch.zeros(1000)}, max_file_bytes=1000)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_model(tmp_path / "file/inside", {}, {"a": torch.zeros(1)})
