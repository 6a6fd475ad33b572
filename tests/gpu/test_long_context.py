"""Long contexts at K2.6's width on CUDA: up to a context whose blocks are of every size.

The whole length, 262,144 positions, is `python tests/e2e/long_context.py`.
"""

from __future__ import annotations

import pytest
import torch
from e2e import long_context

pytestmark = pytest.mark.gpu


def test_ladders_agree() -> None:
    target = long_context.rank_of_eight(torch.device("cuda"), 36_864)
    found = long_context.run(target)
    assert found["faults"] == []
    assert [rung["border"] for rung in found["rungs"]["plain"]] == [128, 2048, 8192, 32_768, 36_864]
