"""Write a trained target as a Kimi K2.6 folder, and read one back for checking.

Names, dtypes, packing and the shape of every JSON file are the published checkpoints', so that
the packaged model exercises the code that loads the real one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from int4 import dequantise, pack, quantise, unpack
from safetensors.torch import load_file, save_file
from target_model import TEXT, THETA, YARN, build
from transformers import DeepseekV3ForCausalLM

PREFIX = "language_model."
LIMIT = 15_000_000
QUANTISATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
                "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def checkpoint_config(text: dict[str, Any]) -> dict[str, Any]:
    """config.json: a kimi_k25 wrapper round a kimi_k2 text model."""
    inner = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **text,
        "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0, "pretraining_tp": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "rope_theta": THETA, "rope_scaling": YARN,
        "quantization_config": QUANTISATION, "dtype": "bfloat16", "use_cache": True,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "bos_token_id": text["bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": text["eos_token_id"],
        "ignore_index": -100,
        "media_placeholder_token_id": 2837,
        "model_type": "kimi_k25",
        "pad_token_id": text["pad_token_id"],
        "text_config": dict(sorted(inner.items())),
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
    }


def expert_tensors(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The three tensors of one quantised projection."""
    q, scale = quantise(weight)
    return {
        f"{name}.weight_packed": pack(q),
        f"{name}.weight_scale": scale.contiguous(),
        f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }


def tensors(model: DeepseekV3ForCausalLM) -> dict[str, torch.Tensor]:
    """Everything under its published name; fused experts are split into single projections."""
    named: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        name, value = PREFIX + key, value.detach().cpu()
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stem = name.rsplit(".", 1)[0]
            for expert, weight in enumerate(value):
                parts = {"down_proj": weight}
                if key.endswith("gate_up_proj"):
                    gate, up = weight.chunk(2)
                    parts = {"gate_proj": gate, "up_proj": up}
                for part, single in parts.items():
                    named |= expert_tensors(f"{stem}.{expert}.{part}", single)
        elif key.endswith("e_score_correction_bias"):
            named[name] = value.float().contiguous()
        elif not key.endswith((".load", ".switch")):
            named[name] = value.to(torch.bfloat16).contiguous()
    return named


def save(model: DeepseekV3ForCausalLM, out: Path) -> int:
    """Weights and JSON files; returns the weights' size. The vocabulary comes beside them."""
    out.mkdir(parents=True, exist_ok=True)
    named = tensors(model)
    size = sum(t.numel() * t.element_size() for t in named.values())
    if size > LIMIT:
        raise SystemExit(f"the weights take {size} bytes, more than the {LIMIT} of one file")
    save_file(named, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(checkpoint_config(TEXT), indent=2) + "\n")
    limit, stop = TEXT["max_position_embeddings"], TEXT["eos_token_id"]
    generation = {"max_length": limit, "eos_token_id": stop}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return (out / "model.safetensors").stat().st_size


def copy_vocabulary(source: Path, out: Path) -> None:
    """The tokenizer's two files."""
    for name in ("tiktoken.model", "tokenizer_config.json"):
        if (source / name).resolve() != (out / name).resolve():
            shutil.copyfile(source / name, out / name)


def load(folder: Path) -> DeepseekV3ForCausalLM:
    """transformers' float32 model with a folder's weights, experts dequantised."""
    stored = load_file(folder / "model.safetensors")
    model = build(TEXT)
    state: dict[str, torch.Tensor] = {}
    for key in model.state_dict():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stem = PREFIX + key.rsplit(".", 1)[0]
            parts = ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
            state[key] = torch.stack(
                [torch.cat([_weight(stored, f"{stem}.{e}.{p}") for p in parts])
                 for e in range(TEXT["n_routed_experts"])]
            )
        else:
            state[key] = stored[PREFIX + key].float()
    model.load_state_dict(state)
    return model.eval()


def _weight(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """One projection of one expert in float32."""
    q = unpack(stored[f"{name}.weight_packed"])
    return dequantise(q, stored[f"{name}.weight_scale"]).float()


def main() -> None:
    """Print what a written folder holds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    stored = load_file(parser.parse_args().folder / "model.safetensors")
    kinds: dict[str, int] = {}
    for value in stored.values():
        kinds[str(value.dtype)] = kinds.get(str(value.dtype), 0) + value.numel()
    print(len(stored), "tensors;", kinds)


if __name__ == "__main__":
    main()
