"""Forward passes that nobody here wrote: transformers' DeepSeek-V3 and Kimi K2.5 classes.

Float32 and eager attention. Import inside tests that may skip: both libraries are optional.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


def load_transformers(folder: Path, family: str) -> Any:
    """The float32 transformers model of a folder of this family; skips if absent.

    INT4 and dense folders are loaded in the config's dtype (bf16, as published), then widened, so
    that INT4 means bf16(q x scale). FP8 is dequantised into the float32 model: q x scale,
    unrounded. transformers fixes the eps of the q_a and kv_a norms at 1e-6; here they get the
    config's, as elsewhere.
    """
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    transformers.logging.set_verbosity_error()  # it lists what it skips, too
    options: dict[str, Any] = {
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    data = json.loads((folder / "config.json").read_text())
    text = data.get("text_config", data)
    options["dtype"] = getattr(torch, text.get("dtype", "bfloat16"))
    quantization = text.get("quantization_config", {})
    if quantization.get("quant_method") == "compressed-tensors":
        pytest.importorskip("compressed_tensors", reason="INT4 in transformers needs it")
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    elif quantization:
        options["dtype"] = torch.float32
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    if family == "k2.6":
        loader = transformers.AutoModelForImageTextToText
    else:
        assert family in ("deepseek-v3", "k2", "k2-thinking"), family
        loader = transformers.DeepseekV3ForCausalLM
    with warnings.catch_warnings(), _native(folder, data) as home:
        # It warns that `dequantize` is taken from here and the rest from the folder: as meant.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        model = loader.from_pretrained(str(home), **options).float().eval()
    config = model.config.get_text_config()
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config.rms_norm_eps
    return model


@contextmanager
def _native(folder: Path, data: dict[str, Any]) -> Iterator[Path]:
    """`folder`, or one like it that says deepseek_v3: transformers knows no kimi_k2 of its own."""
    if data["model_type"] != "kimi_k2":
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        for file in folder.glob("*.safetensors*"):
            (Path(place) / file.name).symlink_to(file)
        config = json.dumps(data | {"model_type": "deepseek_v3"})
        (Path(place) / "config.json").write_text(config)
        yield Path(place)


def transformers_logits(folder: Path, token_ids: Sequence[int], family: str) -> Tensor:
    """Logits of every position, float32 [T, V], by transformers; skips where it is absent."""
    model = load_transformers(folder, family)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    logits: Tensor = out.logits[0].float()
    return logits
