"""The golden models against transformers, which nobody here wrote. Float32, eager attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import dflash, model, tiny

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
torch = pytest.importorskip("torch")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
safetensors_torch = pytest.importorskip("safetensors.torch")

TOLERANCE = 1e-4  # of the reference's standard deviation

TARGETS: dict[str, dict[str, Any]] = {
    "v3: yarn, groups, two dense layers": {},
    "k2: yarn, one group, one dense layer": {
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
    },
    "no yarn, q_proj, two shared, not normalised": {
        "rope_scaling": None,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
    },
    "mscale_all_dim absent": {"rope_scaling": {k: v for k, v in tiny.YARN.items() if k[0] != "m"}},
}


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < TOLERANCE * expected.std()


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    torch_weights = {
        name: torch.from_numpy(np.array(value)).to(
            torch.bfloat16 if name.endswith("_scale") else torch.from_numpy(value).dtype
        )
        for name, value in weights.items()
    }
    safetensors_torch.save_file(torch_weights, folder / "model.safetensors", {"format": "pt"})


def load(folder: Path, **options: Any) -> Any:
    return transformers.DeepseekV3ForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **options
    ).float()


@pytest.mark.parametrize("name", TARGETS)
def test_target(name: str, tmp_path: Path) -> None:
    config = tiny.target_config(**TARGETS[name])
    weights = tiny.target_weights(config, seed=8)
    write_checkpoint(tmp_path, config, weights)
    reference = load(tmp_path, dtype=torch.float32).eval()
    ids = np.random.default_rng(9).integers(0, config["vocab_size"], size=40)
    with torch.no_grad():
        out = reference(torch.from_numpy(ids)[None], output_hidden_states=True)
    got = model.forward(config, weights, ids)
    assert_close(got.logits, out.logits[0].numpy())
    for layer in range(config["num_hidden_layers"] - 1):  # the last one there is after the norm
        assert_close(got.hidden[layer], out.hidden_states[layer + 1][0].numpy())


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_target_with_int4_experts(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": 32,
            "dynamic": False,
        },
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    }
    config = tiny.target_config()
    weights = tiny.with_int4_experts(tiny.target_weights(config, seed=10))
    write_checkpoint(tmp_path, {**config, "quantization_config": quantization}, weights)
    options = transformers.CompressedTensorsConfig(dequantize=True)
    reference = load(tmp_path, quantization_config=options).eval()
    ids = np.random.default_rng(11).integers(0, config["vocab_size"], size=24)
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert_close(model.forward(config, weights, ids).logits, expected)


def qwen3(config: dict[str, Any], weights: dict[str, Any]) -> Any:
    """A drafter without context injection is a Qwen3 stack; fc and hidden_norm have no place."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "dflash_config")}
    reference = transformers.Qwen3Model(
        transformers.Qwen3Config(**fields, attn_implementation="eager")
    ).eval()
    state = {
        name: torch.from_numpy(value)
        for name, value in weights.items()
        if not name.startswith(("fc.", "hidden_norm."))
    }
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert missing == ["embed_tokens.weight"]
    assert not unexpected
    return reference


def run_qwen3(reference: Any, rows: np.ndarray, positions: np.ndarray, seen: np.ndarray) -> Any:
    mask = torch.from_numpy(np.where(seen, 0.0, -np.inf).astype(np.float32))[None, None]
    with torch.no_grad():
        out = reference(
            inputs_embeds=torch.from_numpy(rows.astype(np.float32))[None],
            position_ids=torch.from_numpy(positions)[None],
            attention_mask={"full_attention": mask, "sliding_attention": mask},
            use_cache=False,
        )
    return out.last_hidden_state[0].numpy()


@pytest.mark.parametrize("yarn", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_drafter_block_alone_is_qwen3(causal: bool, yarn: bool) -> None:
    config = tiny.drafter_config(is_causal=causal, **({"rope_scaling": tiny.YARN} if yarn else {}))
    weights = tiny.drafter_weights(config, seed=12)
    block, start = np.random.default_rng(13).normal(size=(5, 64)), 21
    got = dflash.draft(config, weights, np.zeros((0, 128)), np.zeros(0, int), block, start)
    seen = np.tri(5, dtype=bool) if causal else np.ones((5, 5), dtype=bool)
    expected = run_qwen3(qwen3(config, weights), block, start + np.arange(5), seen)
    assert_close(got, expected)


def test_drafter_context_enters_as_keys_and_values() -> None:
    """One layer whose context rows are what a Qwen3 layer would make of ordinary rows."""
    one_tap = {"mask_token_id": 130, "target_layer_ids": [0]}
    config = tiny.drafter_config(num_hidden_layers=1, dflash_config=one_tap)
    weights = tiny.drafter_weights(config, seed=14)
    weights["fc.weight"] = np.eye(64, dtype=np.float32)
    weights["hidden_norm.weight"] = weights["layers.0.input_layernorm.weight"]
    rows = np.random.default_rng(15).normal(size=(9 + 5, 64))
    got = dflash.draft(config, weights, rows[:9], np.arange(9), rows[9:], 9)
    seen = np.ones((14, 14), dtype=bool)
    expected = run_qwen3(qwen3(config, weights), rows, np.arange(14), seen)[9:]
    assert_close(got, expected)
