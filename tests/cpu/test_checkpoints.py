"""Writing and opening model folders: round trips, and agreement with the libraries' own readers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import load_transformers, transformers_logits
from safetensors.torch import load_file, save_file

from kdtree_engine.checkpoints import check_drafter, open_drafter, open_model
from kdtree_engine.checkpoints.names import expected_tensors
from kdtree_engine.checkpoints.templates import Dims, default_taps
from kdtree_engine.checkpoints.write import make_checkpoint, write_model
from kdtree_engine.config import DraftMask, RopeConfig
from kdtree_engine.errors import DrafterError
from kdtree_engine.kernels.fp8 import Fp8Tensor
from kdtree_engine.kernels.int4 import Int4Tensor, dequantise, quantise
from kdtree_engine.tokenizer.chat import detect_family

FAMILIES = ("k2.6", "deepseek-v3")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def edit(folder: Path, change: dict[str, Any], name: str = "config.json") -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    path = folder / name
    data = json.loads(path.read_text())
    for key, value in change.items():
        data.pop(key, None)
        if value is not None:
            data[key] = value
    path.write_text(json.dumps(data))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by stored name, by safetensors' own reader."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(str(file))
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", [None, 90_000])
def test_round_trip(tmp_path: Path, family: str, limit: int | None) -> None:
    make_checkpoint(tmp_path, family, seed=3, max_file_bytes=limit)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 4) == (limit is not None)
    assert all(limit is None or file.stat().st_size <= limit for file in files)
    ckpt, raw = open_model(tmp_path), stored(tmp_path)
    prefix = ckpt.config.tensor_prefix
    assert prefix == ("language_model." if family == "k2.6" else "")
    for name, tensor in raw.items():
        if ".experts." in name or not name.startswith((prefix + "model.", prefix + "lm_head.")):
            continue
        if "layers.4." not in name:  # the multi-token-prediction layer
            assert torch.equal(ckpt.tensor(name.removeprefix(prefix)), tensor), name
    for layer in range(ckpt.config.first_dense_layers, 4):
        experts = ckpt.experts(layer)
        assert experts.count == 8
        for expert in range(8):
            values = []
            for projection in PROJECTIONS:
                module = f"{prefix}model.layers.{layer}.mlp.experts.{expert}.{projection}"
                if family == "deepseek-v3":
                    assert experts.form(expert, projection) == "dense"
                    values.append(raw[module + ".weight"])
                    continue
                packed = experts.stored(expert, projection)
                assert isinstance(packed, Int4Tensor)
                assert torch.equal(packed.packed, raw[module + ".weight_packed"])
                assert torch.equal(packed.scale, raw[module + ".weight_scale"])
                values.append(dequantise(packed))
            assert torch.equal(experts.gate_up(expert), torch.cat(values[:2]))
            assert torch.equal(experts.down(expert), values[2])
            assert experts.gate_up(expert).shape == (64, 64)
            assert experts.down(expert).shape == (64, 32)


def test_the_config_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "k", "k2.6")
    make_checkpoint(tmp_path / "d", "deepseek-v3", dims=Dims(yarn_factor=None, q_lora_rank=None))
    kimi, deepseek = open_model(tmp_path / "k"), open_model(str(tmp_path / "d"))
    assert kimi.folder == tmp_path / "k"
    assert kimi.config.family == "k2.5"
    assert kimi.config.quantization == "int4"
    assert kimi.config.eos_token_ids == (154, 153)  # config.json, then generation_config.json
    assert (kimi.config.bos_token_id, kimi.config.pad_token_id) == (152, 159)
    assert kimi.config.rope == RopeConfig(
        50000.0, "yarn", 64.0, 64, 32.0, 1.0, mscale=1.0, mscale_all_dim=1.0
    )
    assert kimi.notes == ("skipped 23 vision tensors",)
    assert deepseek.config.family == "deepseek-v3"
    assert deepseek.config.q_lora_rank is None
    assert deepseek.tensor("model.layers.0.self_attn.q_proj.weight").shape == (96, 64)
    assert deepseek.config.rope == RopeConfig(10000.0)
    assert (deepseek.config.num_groups, deepseek.config.top_groups) == (4, 2)
    assert [deepseek.config.is_moe_layer(layer) for layer in range(4)] == [False] * 2 + [True] * 2
    assert deepseek.notes == ("skipped the multi-token-prediction layer 4 (42 tensors)",)


def test_fp8_round_trip(tmp_path: Path) -> None:
    """Values, scales and forms as stored; the config and what is skipped, of K2 and DeepSeek-V3."""
    make_checkpoint(tmp_path / "k", "k2", dims=Dims(hidden_size=160))
    make_checkpoint(tmp_path / "d", "deepseek-v3", form="fp8")
    kimi, raw = open_model(tmp_path / "k"), stored(tmp_path / "k")
    assert (kimi.config.family, kimi.config.quantization) == ("k2", "fp8")
    assert (kimi.config.tensor_prefix, kimi.notes) == ("", ())
    names = [n.removesuffix("_scale_inv") for n in raw if n.endswith("_scale_inv")]
    assert len(names) == 4 * 5 + 3 + 3 * (3 + 8 * 3)
    for name in names:
        module = name.removesuffix(".weight")
        if ".experts." in module:
            layer, expert = (int(module.split(".")[at]) for at in (2, 5))
            weight = kimi.experts(layer).stored(expert, module.split(".")[6])
            assert kimi.experts(layer).form(expert, module.split(".")[6]) == "fp8"
        else:
            weight = kimi.weight(module)
        assert isinstance(weight, Fp8Tensor)
        assert torch.equal(weight.values.float(), raw[name].float())
        assert torch.equal(weight.scales, raw[name + "_scale_inv"])
    experts = kimi.experts(2)
    for dtype in (torch.float32, torch.bfloat16):
        parts = [experts.stored(3, name) for name in PROJECTIONS]
        values = [part.dequantize(dtype) for part in parts if isinstance(part, Fp8Tensor)]
        assert torch.equal(experts.gate_up(3, dtype), torch.cat(values[:2]))
        assert torch.equal(experts.down(3, dtype), values[2])
    assert isinstance(kimi.weight("model.layers.1.mlp.gate"), torch.Tensor)
    deepseek = open_model(tmp_path / "d")
    assert (deepseek.config.family, deepseek.config.quantization) == ("deepseek-v3", "fp8")
    # 42 tensors as in bf16, and the scales of its 35 projections.
    assert deepseek.notes == ("skipped the multi-token-prediction layer 4 (77 tensors)",)


TOKENS = {"added_tokens_decoder": {"9": {"content": "<think>"}}}


@pytest.mark.parametrize(
    ("files", "family"),
    [
        ({}, "k2"),
        ({"tokenizer_config.json": {"chat_template": "x"}}, "k2"),
        ({"tokenizer_config.json": TOKENS}, "k2-thinking"),
        ({"tokenizer_config.json": {"chat_template": "x <think>"}}, "k2-thinking"),
        ({"tokenizer_config.json": TOKENS | {"chat_template": "x"}}, "k2"),
        ({"chat_template.jinja": "{{ '<think>' }}"}, "k2-thinking"),
        ({"chat_template.jinja": "{{ 1 }}"}, "k2"),
        ({"chat_template.jinja": "{{ 1 }}", "tokenizer_config.json": TOKENS}, "k2"),
        # An older template that the file beside it has replaced.
        ({"chat_template.jinja": "x", "tokenizer_config.json": {"chat_template": "<think>"}}, "k2"),
        ({"chat_template.json": {"chat_template": "x"}, "tokenizer_config.json": TOKENS}, "k2"),
        ({"chat_template.json": {"chat_template": "<think>"}}, "k2-thinking"),
        (
            {
                "chat_template.json": {"chat_template": "<think>"},
                "tokenizer_config.json": {"chat_template": "x"},
            },
            "k2-thinking",
        ),
    ],
)
def test_k2_and_k2_thinking_are_told_apart_as_chat_does(
    tmp_path: Path, files: dict[str, Any], family: str
) -> None:
    make_checkpoint(tmp_path, "k2-thinking")
    assert open_model(tmp_path).config.family == "k2-thinking" == detect_family(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    config = open_model(tmp_path).config
    assert config.family == family == detect_family(tmp_path)
    assert config.quantization == "int4"


def test_forms_of_the_config(tmp_path: Path) -> None:
    """rope_parameters for rope_scaling, rope_type for type, quantization at top level."""
    make_checkpoint(tmp_path, "k2.6")
    wanted = open_model(tmp_path).config
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    rope = text.pop("rope_scaling")
    rope |= {"rope_type": rope.pop("type"), "rope_theta": text.pop("rope_theta")}
    top = {"quantization_config": text.pop("quantization_config")}
    edit(tmp_path, top | {"text_config": text | {"rope_parameters": rope}})
    assert open_model(tmp_path).config == wanted
    rope["rope_type"] = "default"  # no YaRN, whatever else the object says
    edit(tmp_path, {"text_config": text | {"rope_parameters": rope}})
    assert open_model(tmp_path).config == replace(wanted, rope=RopeConfig(50000.0))
    edit(tmp_path, {"eos_token_id": [7, 9]})
    (tmp_path / "generation_config.json").unlink()
    assert open_model(tmp_path).config.eos_token_ids == (7, 9)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint(tmp_path / name, "k2.6", seed=seed, drafter=True)
    for file in ("model.safetensors", "config.json", "drafter/model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    one, other = tmp_path / "a/model.safetensors", tmp_path / "c/model.safetensors"
    assert one.read_bytes() != other.read_bytes()


def test_slices_are_read_alone_and_memory_is_owned(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "k2.6")
    ckpt, name = open_model(tmp_path), "model.layers.0.mlp.down_proj.weight"
    whole = ckpt.tensor(name)
    assert whole.untyped_storage().nbytes() == whole.nbytes
    part = ckpt.tensor(name, rows=slice(8, 24), columns=slice(32, 64))
    assert torch.equal(part, whole[8:24, 32:64])
    assert part.untyped_storage().nbytes() == part.nbytes
    assert torch.equal(ckpt.tensor(name, columns=slice(0, 32)), whole[:, :32])
    assert torch.equal(ckpt.tensor(name, rows=slice(1, 2)), whole[1:2])
    whole.zero_()
    assert ckpt.tensor(name).abs().sum() > 0


def test_text_part_of_k26_without_prefix_or_vision(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "whole", "k2.6")
    tensors = stored(tmp_path / "whole")
    text = {n.removeprefix("language_model."): t for n, t in tensors.items() if "language" in n}
    config = json.loads((tmp_path / "whole/config.json").read_text())
    write_model(tmp_path / "text", config, text)
    ckpt = open_model(tmp_path / "text")
    assert ckpt.config.tensor_prefix == ""
    assert ckpt.notes == ()
    assert ckpt.experts(1).down(0).shape == (64, 32)


def test_one_expert_left_dense(tmp_path: Path) -> None:
    """The form is decided per module by the tensors that exist."""
    make_checkpoint(tmp_path, "k2.6")
    tensors = stored(tmp_path)
    module = "language_model.model.layers.2.mlp.experts.5.up_proj"
    for part in ("packed", "scale", "shape"):
        del tensors[f"{module}.weight_{part}"]
    dense = torch.randn(32, 64).to(torch.bfloat16)
    save_file(tensors | {f"{module}.weight": dense}, str(tmp_path / "model.safetensors"))
    experts = open_model(tmp_path).experts(2)
    assert experts.form(5, "up_proj") == "dense"
    assert experts.form(5, "gate_proj") == "int4"
    assert torch.equal(experts.gate_up(5)[32:], dense)


def test_tied_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v3")
    edit(tmp_path, {"tie_word_embeddings": True})
    ckpt = open_model(tmp_path)
    assert torch.equal(ckpt.tensor("lm_head.weight"), ckpt.tensor("model.embed_tokens.weight"))
    assert any("lm_head" in note for note in ckpt.notes)


def test_hugging_face_cache_layout(tmp_path: Path) -> None:
    """A download lies in blobs/, and snapshots/REVISION holds links to it."""
    make_checkpoint(tmp_path / "made", "k2.6", max_file_bytes=200_000)
    snapshot, blobs = tmp_path / "models--x/snapshots/abc", tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate((tmp_path / "made").iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert open_model(snapshot).config.num_layers == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_we_write(tmp_path: Path, family: str) -> None:
    """Every weight of the language model, bit for bit; logits spread as asked."""
    make_checkpoint(tmp_path, family, seed=5, max_file_bytes=150_000)
    ckpt, model = open_model(tmp_path), load_transformers(tmp_path, family)
    theirs = {
        n.replace("model.language_model.", "model."): t for n, t in model.state_dict().items()
    }
    seen = 0
    for name, tensor in theirs.items():
        if name.startswith(("model.vision_tower.", "model.mm_projector.")):
            continue
        seen += 1
        if ".mlp.experts." in name:
            experts = ckpt.experts(int(name.split(".")[2]))
            read = experts.gate_up if "gate_up" in name else experts.down
            ours = torch.stack([read(expert) for expert in range(8)])
        else:
            ours = ckpt.tensor(name)
        assert torch.equal(ours.float(), tensor), name
    fused = 2 * (4 - ckpt.config.first_dense_layers)
    assert seen == len(expected_tensors(ckpt.config, experts=False)) + fused
    logits = transformers_logits(tmp_path, range(100), family)
    assert logits.shape == (100, 160)
    assert 0.8 < float(logits.std()) < 1.25


def test_logit_std(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v3", logit_std=0.01)
    logits = transformers_logits(tmp_path, range(90), "deepseek-v3")
    assert 0.008 < float(logits.std()) < 0.0125


def test_transformers_own_folder(tmp_path: Path) -> None:
    """A folder that transformers wrote: rope_parameters, no scoring_func, experts one by one."""
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    make_checkpoint(tmp_path / "ours", "deepseek-v3")
    load_transformers(tmp_path / "ours", "deepseek-v3").save_pretrained(tmp_path / "theirs")
    assert transformers.__version__ in (tmp_path / "theirs/config.json").read_text()
    ours, theirs = open_model(tmp_path / "ours"), open_model(tmp_path / "theirs")
    assert replace(theirs.config, num_mtp_layers=1) == ours.config
    for name in ("model.norm.weight", "model.layers.2.mlp.gate.e_score_correction_bias"):
        assert torch.equal(theirs.tensor(name), ours.tensor(name).float())
    assert torch.equal(theirs.experts(3).gate_up(7), ours.experts(3).gate_up(7).float())


def test_int4_as_compressed_tensors_writes_it(tmp_path: Path) -> None:
    """Their compressor on our float weights: int64 weight_shape, the same words."""
    pytest.importorskip("compressed_tensors", reason="the oracle needs compressed-tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor as Packer
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    make_checkpoint(tmp_path, "k2.6")
    tensors, opened = stored(tmp_path), {}
    for layer in (1, 2, 3):
        for expert in range(8):
            for projection in PROJECTIONS:
                key = (layer, expert, projection)
                module = f"language_model.model.layers.{layer}.mlp.experts.{expert}.{projection}"
                scale = tensors[f"{module}.weight_scale"]
                weight = torch.randn(scale.shape[0], scale.shape[1] * 32)
                state = {"weight": weight, "weight_scale": quantise(weight).scale}
                theirs = Packer.compress(state, scheme)
                assert theirs["weight_shape"].dtype == torch.int64
                tensors |= {f"{module}.{part}": value for part, value in theirs.items()}
                opened[key] = Packer.decompress(theirs, scheme)["weight"]
    save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    ckpt = open_model(tmp_path)
    for (layer, expert, projection), value in opened.items():
        assert torch.equal(ckpt.experts(layer).weight(expert, projection), value)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_drafter_round_trip(tmp_path: Path, prefix: str) -> None:
    types = ("sliding_attention", "full_attention")
    dims = Dims(drafter_layer_types=types, yarn_factor=None)
    make_checkpoint(tmp_path, "k2.6", seed=2, drafter=True, dims=dims)
    folder = tmp_path / "drafter"
    raw = stored(folder)
    assert len(raw) == 2 * 11 + 3
    renamed = {prefix + name: tensor for name, tensor in raw.items()}
    save_file(renamed, str(folder / "model.safetensors"))
    drafter = open_drafter(folder)
    for name, tensor in raw.items():
        assert torch.equal(drafter.tensor(name), tensor)
        assert torch.equal(drafter.tensor("model." + name), tensor)
    config = drafter.config
    assert (config.block_size, config.horizon, config.mask_token_id) == (8, 7, 158)
    assert config.tap_layers == default_taps(4) == (0, 2, 3)
    assert config.masks == (DraftMask(causal=True, sliding=32), DraftMask())
    assert config.rope == RopeConfig(50000.0)
    check_drafter(config, open_model(tmp_path).config)
    edit(folder, {"layer_types": None, "block_size": None})
    inner = json.loads((folder / "config.json").read_text())["dflash_config"]
    edit(folder, {"dflash_config": inner | {"block_size": 5}})
    again = open_drafter(folder).config
    assert (again.block_size, again.masks) == (5, (DraftMask(),) * 2)


def test_default_taps_follow_the_published_rule() -> None:
    assert default_taps(61, 6) == (1, 12, 24, 35, 47, 58)
    assert default_taps(61, 1) == (30,)
    assert default_taps(10) == (1, 4, 7)
    assert default_taps(2) == (0, 1)
    assert default_taps(1) == (0,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 128}, "hidden size is 128"),
        ({"vocab_size": 200}, "vocabulary size is 200"),
        ({"num_target_layers": 7}, "number of target layers is 7"),
        ({"mask_token_id": 160}, "mask_token_id 160 is outside"),
        ({"tap_layers": (1, 4)}, r"\[4\] are outside"),
        ({"tap_layers": ()}, "must be distinct"),
        ({"tap_layers": (1, 1)}, "must be distinct"),
        ({"block_size": 1}, "block_size 1"),
    ],
)
def test_drafters_that_do_not_fit(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    make_checkpoint(tmp_path, "k2.6", drafter=True)
    drafter, target = open_drafter(tmp_path / "drafter").config, open_model(tmp_path).config
    with pytest.raises(DrafterError, match=reason) as caught:
        check_drafter(replace(drafter, **change), target)
    assert "\n" not in str(caught.value)


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    """The bytes of the tensors may be anything: zeroed data opens, and memory stays small."""
    make_checkpoint(tmp_path, "k2.6")
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], sys.byteorder)
    data[start:] = bytes(len(data) - start)
    path.write_bytes(data)
    assert open_model(tmp_path).tensor("model.norm.weight").abs().sum() == 0
