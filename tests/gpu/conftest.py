"""GPU tests run where there is a GPU, without gradients, as the engine does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    """Skip without a GPU; no gradients, and no memory that happens to hold zeros."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with torch.inference_mode():
        poison = torch.full((1 << 26,), torch.nan, device="cuda")
        del poison
        yield
