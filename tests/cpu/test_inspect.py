"""`kdtree inspect` on every kind of folder; published sizes on folders of headers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import (
    CheckpointMaker,
    Header,
    copy,
    edit,
    network_bytes,
    stored_tensors,
    write_headers,
)
from safetensors.torch import save_file

from kdtree_engine import cli
from kdtree_engine.checkpoints import open_model
from kdtree_engine.checkpoints.drafter_config import is_drafter
from kdtree_engine.checkpoints.model_config import parse_model_config
from kdtree_engine.checkpoints.names import PARTS, expected_tensors, expert_modules, fp8_form
from kdtree_engine.checkpoints.names import projection_of as projection
from kdtree_engine.checkpoints.templates import Dims, model_template
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.cli.inspect import as_json, show
from kdtree_engine.engine.describe import GPU_BYTES, TargetReport, describe, rank_share
from kdtree_engine.engine.memory import weight_bytes
from kdtree_engine.model import load_target

Capture = pytest.CaptureFixture[str]

# reference values of K2.6's config.json
K26 = Dims(
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
    experts_per_token=8,
    rms_norm_eps=1e-5,
    yarn_original=4096,
    max_positions=262_144,
)
# and of DeepSeek-V3's
V3 = Dims(
    **{
        **vars(K26),
        "vocab_size": 129_280,
        "num_heads": 128,
        "num_experts": 256,
        "num_groups": 8,
        "top_groups": 4,
        "first_dense_layers": 3,
        "mtp_layers": 0,
        "yarn_factor": 40.0,
        "max_positions": 163_840,
    }
)


def report(capsys: Capture, *arguments: str) -> dict[str, Any]:
    """What `kdtree inspect --json` says."""
    assert cli.run(["inspect", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    data: dict[str, Any] = json.loads(out)
    return data


def tables(capsys: Capture, *arguments: str) -> str:
    assert cli.run(["inspect", *arguments]) == 0
    return capsys.readouterr().out


def vision_headers() -> dict[str, Header]:
    """K2.6's vision tower and projector: 335 bf16 tensors."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (1152, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (1152,),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1152),
    }
    linears = {
        "mm_projector.proj.0": (4608, 4608),
        "mm_projector.proj.2": (7168, 4608),
    }
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for block in range(27):
        prefix = f"vision_tower.encoder.blocks.{block}."
        norms += [prefix + "norm0", prefix + "norm1"]
        linears |= {
            prefix + "wqkv": (3456, 1152),
            prefix + "wo": (1152, 1152),
            prefix + "mlp.fc0": (4304, 1152),
            prefix + "mlp.fc1": (1152, 4304),
        }
    for name, (rows, columns) in linears.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in norms:
        shapes |= {f"{name}.weight": (1152,), f"{name}.bias": (1152,)}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def k26(tmp_path_factory: pytest.TempPathFactory) -> TargetReport:
    """On all of K2.6's headers in 64 files, as published, over holes."""
    config = model_template("k2.6", K26)
    shards: list[dict[str, Header]] = [{} for _ in range(64)]
    specs = expected_tensors(parse_model_config(config, "K2.6"))
    for name, spec in specs.items():
        number = int(name.split(".")[2]) if ".layers." in name else 61
        shards[number]["language_model." + name] = (spec.dtypes[0], spec.shape)
    for name, header in vision_headers().items():
        shards[62 if name.startswith("mm_") else 63][name] = header
    folder = tmp_path_factory.mktemp("big") / "Kimi-K2.6"
    write_headers(folder, config, shards)
    described = describe(folder)
    assert isinstance(described, TargetReport)
    return described


def test_kimi_k26(k26: TargetReport) -> None:
    data = json.loads(json.dumps(as_json(k26)))
    assert (data["kind"], data["config"]["family"]) == ("target", "k2.5")
    assert data["tensors"] == 208_550
    assert round(data["total_bytes"] / 1e9) == 595
    assert round(data["total_bytes"] / 2**30, 1) == 554.3
    assert round(data["part_bytes"]["routed experts"] / 1e9, 1) == 570.8
    text = sum(size for part, size in data["part_bytes"].items() if part != "skipped")
    assert round((text - data["part_bytes"]["routed experts"]) / 1e9, 1) == 23.4
    assert data["part_bytes"]["embedding and head"] == 2 * 163_840 * 7168 * 2
    assert data["skipped"] == {"vision": data["part_bytes"]["skipped"]}
    assert round(data["total_parameters"] / 1e9) == 1026
    assert round(data["active_parameters"] / 1e9) == 32
    assert data["kv_bytes_per_token"] == 70_272
    assert data["default_taps"] == [1, 12, 24, 35, 47, 58]
    assert data["notes"] == ["skipped 335 vision tensors"]


def test_kimi_k26_on_gpus(k26: TargetReport) -> None:
    """Heads, inner widths and vocabulary are split; what goes into the latents is not."""
    ranks = {rank["gpus"]: rank for rank in as_json(k26)["ranks"]}
    assert list(ranks) == [1, 2, 4, 8]
    replicated = 61 * 7168 * (1536 + 576 + 2) + 60 * 384 * (7168 + 2) + 61 * (1536 + 512) + 7168
    whole = ranks[1]["weight_bytes"]
    for gpus, rank in ranks.items():
        share = 2 * replicated + (whole - 2 * replicated) / gpus
        assert rank["weight_bytes"] == pytest.approx(share, rel=1e-9)
        for size, tokens in rank["cache_tokens"].items():
            left = GPU_BYTES[size] - rank["weight_bytes"]
            assert tokens == (int(left * 0.8) // 70_272 if left > 0 else None)
    assert ranks[4]["cache_tokens"]["H200"] is None
    assert ranks[4]["cache_tokens"]["B200"] > 262_144
    assert 90_000 < ranks[8]["cache_tokens"]["H100"] < 120_000
    assert 800_000 < ranks[8]["cache_tokens"]["H200"] < 900_000


def test_kimi_k26_as_tables(k26: TargetReport, capsys: Capture) -> None:
    show(k26)
    out = capsys.readouterr().out
    for part in (
        "1,026.4 billion, 31.7 billion active a token",
        "595.1 GB in 208,550 tensors",
        "61: 1 dense, 60 of experts",
        "384, 8 a token, 1 shared, 2,048 wide",
        "70,272 bytes",
        "INT4 routed experts, groups of 32",
        "570.8 GB",
        "skipped: vision",
        "0 to 163,839",
        "by default 1, 12, 24, 35, 47, 58",
        "too small",
        "without a drafter",
        "85.5 GB",
        "Note: skipped 335 vision tensors.",
    ):
        assert part in out, part
    assert max(map(len, out.splitlines())) <= 80


def test_memory_of_fp8() -> None:
    """DeepSeek-V3 and K2 stay at a byte a weight on CUDA; elsewhere they are expanded."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    config = parse_model_config(model_template("deepseek-v3", V3, "fp8"), "V3")
    got = weight_bytes(config, torch.bfloat16, cuda)
    want = 0
    tiles = [(2112, 7168), (24_576, 1536), (7168, 16_384)]
    for layer in range(61):
        own = tiles if layer > 2 else [*tiles, (2 * 18_432, 7168), (7168, 18_432)]
        want += sum(rows * columns + 4 * rows * columns // 64**2 for rows, columns in own)
    for name, spec in expected_tensors(config, experts=False).items():
        wide = projection(name) is None or "kv_b_proj" in name or "shared" in name
        size = 4 if name.endswith("_bias") else 2
        want += size * torch.Size(spec.shape).numel() if wide else 0
    want += 58 * 256 * 3 * (2048 * 7168 + 4 * 2048 * 7168 // (8 * 64))
    # 671 billion parameters; embedding, head, router, kv_b and shared experts in bf16.
    assert 676e9 < got < 683e9
    assert weight_bytes(config, torch.bfloat16, cpu) == 2 * 671_026_419_200
    assert weight_bytes(config, torch.float32, cpu) == 4 * 671_026_419_200
    assert rank_share(config, 8).cache_tokens["H100"] is None
    assert (rank_share(config, 8).cache_tokens["H200"] or 0) > 500_000


def test_fp8_headers_of_kimi_k2(tmp_path: Path, capsys: Capture) -> None:
    """K2-Instruct's first two layers at full width: partial blocks of kv_a, scales beside."""
    dims = Dims(**{**vars(K26), "num_layers": 2, "yarn_factor": 32.0, "max_positions": 131_072})
    config = model_template("k2", dims)
    parsed = parse_model_config(config, "K2")
    shard: dict[str, Header] = {}
    for name, spec in expected_tensors(parsed, experts=False).items():
        module = projection(name)
        forms = {name: spec} if module is None else fp8_form(module, (spec.shape[0], spec.shape[1]))
        shard |= {one: (form.dtypes[0], form.shape) for one, form in forms.items()}
    for module, shape in expert_modules(parsed):
        forms = fp8_form(module, shape)
        shard |= {one: (form.dtypes[0], form.shape) for one, form in forms.items()}
    kv_a = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    assert shard[kv_a] == ("F32", (5, 56))
    write_headers(tmp_path / "k2", config, [shard])
    data = report(capsys, str(tmp_path / "k2"))
    assert (data["config"]["family"], data["config"]["quantization"]) == ("k2", "fp8")
    assert data["part_bytes"]["routed experts"] == 384 * 3 * (2048 * 7168 + 4 * 16 * 56)
    assert data["part_bytes"]["router"] == 384 * 7168 * 2 + 384 * 4
    assert "FP8 projections, blocks of 128 x 128" in tables(capsys, str(tmp_path / "k2"))


KINDS = [
    ("k2.6", None, "k2.5", "int4"),
    ("k2-thinking", None, "k2-thinking", "int4"),
    ("k2", None, "k2", "fp8"),
    ("deepseek-v3", "fp8", "deepseek-v3", "fp8"),
    ("deepseek-v3", None, "deepseek-v3", "none"),
]


@pytest.mark.parametrize(("family", "form", "named", "quantization"), KINDS)
def test_every_kind(
    family: str,
    form: str | None,
    named: str,
    quantization: str,
    checkpoint: CheckpointMaker,
    capsys: Capture,
) -> None:
    folder = checkpoint(family, form=form)
    data, tensors = report(capsys, str(folder)), stored_tensors(folder)
    assert (data["config"]["family"], data["config"]["quantization"]) == (named, quantization)
    assert list(data["part_bytes"]) == list(PARTS)
    assert data["total_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert data["tensors"] == len(tensors)
    marks = {
        "routed experts": ".experts.",
        "shared experts": ".shared_experts.",
        "router": ".mlp.gate.",
    }
    for part, mark in marks.items():
        own = [t.nbytes for n, t in tensors.items() if mark in n and "layers.4." not in n]
        assert data["part_bytes"][part] == sum(own) > 0, part
    assert data["part_bytes"]["embedding and head"] == 2 * 2 * 160 * 64
    wanted = {"k2.6": ["vision"], "deepseek-v3": ["mtp"]}
    assert list(data["skipped"]) == wanted.get(family, [])
    assert sum(data["skipped"].values()) == data["part_bytes"]["skipped"]
    assert named in tables(capsys, str(folder))


def test_dimensions_that_do_not_divide(checkpoint: CheckpointMaker, capsys: Capture) -> None:
    """Four heads, and INT4 groups of 32 that no rank may cut."""
    ranks = report(capsys, str(checkpoint("k2.6")))["ranks"]
    assert [rank["weight_bytes"] is None for rank in ranks] == [False, True, True, True]
    ranks = report(capsys, str(checkpoint("deepseek-v3")))["ranks"]
    assert [rank["weight_bytes"] is None for rank in ranks] == [False, False, False, True]
    assert "not divisible" in tables(capsys, str(checkpoint("deepseek-v3")))


def test_the_packaged_model_and_its_drafter(capsys: Capture) -> None:
    data = report(capsys)
    assert data["config"]["vocab_size"] == 3072
    drafter = str(Path(data["folder"]).parent / "drafter")
    own = report(capsys, drafter)
    assert own["kind"] == "drafter"
    assert own["config"]["num_target_layers"] == data["config"]["num_layers"]
    file = Path(drafter) / "model.safetensors"
    assert 0 < file.stat().st_size - own["total_bytes"] < 5000  # its header
    assert own["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 2
    out = tables(capsys, drafter)
    for part in (
        "8 slots, 7 drafted positions",
        "10 (taps 1, 4, 7)",
        "3,070",
        "3,072",
    ):
        assert part in out, part


def test_a_drafter_from_its_anchor_and_what_was_skipped(tmp_path: Path, capsys: Capture) -> None:
    """Its root's slot guesses too, so it drafts as many positions as a block has slots."""
    dims = Dims(block_size=6, sample_from_anchor=True)
    make_checkpoint(tmp_path, "k2.6", drafter=True, dims=dims, layout="speculators")
    folder = tmp_path / "drafter"
    assert "6 slots, 6 drafted positions" in tables(capsys, str(folder))
    stored = stored_tensors(folder)
    stored["verifier_norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    save_file(stored, str(folder / "model.safetensors"), {"format": "pt"})
    said = "skipped the drafter's copies of the target (verifier_norm.weight)"
    assert f"Note: {said}." in tables(capsys, str(folder)).replace("\n", " ")
    assert report(capsys, str(folder))["notes"] == [said]


def test_a_folder_name_is_no_markup(
    checkpoint: CheckpointMaker, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "[red]x[/blue]"
    folder.parent.mkdir()
    folder.symlink_to(checkpoint("k2"))
    assert "[red]x[/blue]" in tables(capsys, str(folder)).replace("\n", "").replace(" ", "")


def test_errors_are_one_line(tmp_path: Path, capsys: Capture, checkpoint: CheckpointMaker) -> None:
    for name, reason in (
        (str(tmp_path / "none"), "no such folder"),
        ("no-lab/no-model", "hf download no-lab/no-model"),
        (str(tmp_path), "config.json: no such file"),
    ):
        assert cli.run(["inspect", name]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert reason in err
        assert err.count("\n") == 1


def test_help_imports_no_torch() -> None:
    script = (
        "import sys, kdtree_engine.cli as cli\n"
        "assert cli.run(['inspect', '--help']) == 0\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_a_drafter_in_another_layout_is_a_drafter(tmp_path: Path) -> None:
    """It is not refused as a target of an unknown kind."""
    for key, value, drafter in (
        ("speculators_model_type", "dflash", True),
        ("dflash_config", {}, True),
        ("model_type", "qwen3", False),
    ):
        (tmp_path / "config.json").write_text(json.dumps({key: value}))
        assert is_drafter(tmp_path) == drafter


LAYOUTS = [
    ("k2", {"moe_intermediate_size": 128}),
    ("k2", {"moe_intermediate_size": 192}),  # FP8 gates whose rows do not fill blocks
    ("k2", {"q_lora_rank": 64, "hidden_size": 320, "intermediate_size": 192}),
    ("k2.6", {"q_lora_rank": None}),
    ("k2.6", {"num_shared_experts": 0}),
    ("deepseek-v3", {"moe_intermediate_size": 40, "q_lora_rank": 24}),
]


@pytest.mark.parametrize(("family", "sizes"), LAYOUTS)
def test_memory_is_what_the_network_takes(
    family: str, sizes: dict[str, Any], checkpoint: CheckpointMaker
) -> None:
    """To the byte: tiles filled up, a scale a tile, and what is expanded."""
    opened = open_model(checkpoint(family, dims=Dims(**sizes)))
    own = load_target(opened, torch.bfloat16, torch.device("cpu"), kernels=True)
    got = weight_bytes(opened.config, torch.bfloat16, torch.device("cuda"))
    assert got == network_bytes(own)


def test_memory_of_a_tied_embedding(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Kernels read the head as tiles: the same numbers lie there twice."""
    folder = copy(checkpoint("deepseek-v3"), tmp_path / "tied")
    edit(folder, {"tie_word_embeddings": True})
    opened = open_model(folder)
    own = load_target(opened, torch.bfloat16, torch.device("cpu"), kernels=True)
    got = weight_bytes(opened.config, torch.bfloat16, torch.device("cuda"))
    assert got == network_bytes(own)
