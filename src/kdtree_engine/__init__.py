"""Tree-speculative inference whose output is exactly the model's own.

The names below are loaded on first use, so that `import kdtree_engine` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdtree_engine.engine.llm import LLM
    from kdtree_engine.engine.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]

_HOMES = {"LLM": ".engine.llm", "SamplingParams": ".engine.sampling_params"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
