"""Forward passes that nobody here wrote: transformers' DeepSeek-V3 and Kimi K2.5 classes.

Float32 and eager attention. Import inside tests that may skip: both libraries are optional.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


def load_transformers(folder: Path, family: str) -> Any:
    """The float32 transformers model of a "k2.6" or "deepseek-v3" folder; skips if absent.

    Loaded in bf16, as published, then widened, so that INT4 means bf16(q x scale). transformers
    fixes the eps of the q_a and kv_a norms at 1e-6; here they get the config's, as elsewhere.
    """
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    transformers.logging.set_verbosity_error()  # it lists what it skips, too
    options: dict[str, Any] = {
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "dtype": torch.bfloat16,
    }
    if family == "k2.6":
        pytest.importorskip("compressed_tensors", reason="INT4 in transformers needs it")
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
        loader = transformers.AutoModelForImageTextToText
    else:
        assert family == "deepseek-v3", family
        loader = transformers.DeepseekV3ForCausalLM
    with warnings.catch_warnings():
        # It warns that `dequantize` is taken from here and the rest from the folder: as meant.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        model = loader.from_pretrained(str(folder), **options).float().eval()
    config = model.config.get_text_config()
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config.rms_norm_eps
    return model


def transformers_logits(folder: Path, token_ids: Sequence[int], family: str) -> Tensor:
    """Logits of every position, float32 [T, V], by transformers; skips where it is absent."""
    model = load_transformers(folder, family)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    logits: Tensor = out.logits[0].float()
    return logits
