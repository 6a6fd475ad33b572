"""tests/e2e/long_context.py in small, on the CPU, and what it must find."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from e2e import long_context
from kdtree_engine.engine.measure.shapes import TINY, share
from kdtree_engine.engine.measure.weights import random_target


def test_ladders_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "BORDERS", (64, 128))
    config = replace(share(TINY, 8), num_layers=2, max_positions=300)
    target = random_target(config, torch.float32, torch.device("cpu"))
    found = long_context.run(target, (100, 33, 64))
    assert found["faults"] == []
    assert [rung["border"] for rung in found["rungs"]["plain"]] == [64, 128, 300]
    assert found["rows_compared"] == 5 * long_context.NEW
    last = found["rungs"]["replay"][-1]
    assert last["prompt"] + last["tokens"] == 300 and last["from_prefix_cache"] >= 128
    assert found["rungs"]["random"][0]["from_prefix_cache"] == 0


def test_faults_are_found() -> None:
    rows = torch.randn(long_context.NEW, 9)
    tokens = list(range(long_context.NEW))
    rung = {"border": 64, "tokens": long_context.NEW, "error": None, "allocated": 5}
    good = long_context.Climbed([], {64: tokens}, {64: rows}, [rung])
    other = rows.clone()
    other.view(torch.int32)[3, 2] ^= 1
    bad = long_context.Climbed(
        [], {64: tokens[::-1]}, {64: other}, [rung, {**rung, "allocated": 6}]
    )
    assert long_context.differences("x", good, good) == long_context.faults("x", good) == []
    assert len(long_context.differences("x", bad, good)) == 2
    assert "rows [3]" in long_context.differences("x", bad, good)[1]
    assert "memory grew" in long_context.faults("x", bad)[0]
    fallen = long_context.Climbed([], {}, {}, [rung, {**rung, "allocated": 4}])
    assert long_context.faults("x", fallen) == [], "memory of something earlier, collected late"
    back = [rung, {**rung, "allocated": 4}, {**rung, "allocated": 6}]
    assert long_context.faults("x", long_context.Climbed([], {}, {}, back))
    early = long_context.Climbed([], {}, {}, [{**rung, "tokens": 3, "error": "it broke"}])
    assert "it broke" in long_context.faults("x", early)[0]
