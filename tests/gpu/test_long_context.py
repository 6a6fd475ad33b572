"""Long contexts at K2.6's width on CUDA: up to a context whose blocks are of every size.

The whole length, 262,144 positions, is `python tests/e2e/long_context.py`.
"""

from __future__ import annotations

import pytest
import torch
from e2e import long_context

pytestmark = pytest.mark.gpu


def test_ladders_agree() -> None:
    longest = long_context.ZONES[-1] + 4096
    found = long_context.run(long_context.rank_of_eight(torch.device("cuda"), longest))
    assert found["faults"] == []
    borders = [rung["border"] for rung in found["rungs"]["plain"]]
    assert borders[-1] == longest and set(long_context.ZONES) <= set(borders)
