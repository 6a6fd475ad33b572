"""`kdtree bench step` on CUDA: the gate over captured steps, and a whole run of the tiny shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kdtree_engine import cli
from kdtree_engine.engine.measure import gate, step, timing, weights
from kdtree_engine.engine.measure.shapes import KIMI_K26, TINY, share

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("ranks", [1, 8])
@torch.inference_mode()
def test_rows_have_the_bits_of_plain_decoding(ranks: int) -> None:
    target = weights.random_target(share(TINY, ranks), torch.bfloat16, CUDA)
    gate.check_rows(target, torch.bfloat16)


@torch.inference_mode()
def test_one_graph_for_every_context_and_every_repeat() -> None:
    """Two layers of one rank's share of K2.6, eight requests."""
    target = weights.random_target(
        replace(share(KIMI_K26, 8), num_layers=2), torch.bfloat16, CUDA, "zipf"
    )
    cache = step.random_cache(target, 8, 10, torch.bfloat16)
    one = step.verification(target, cache, 8, 8, temperature=0.6)
    one.set_context(100)
    replay = timing.captured(one.run, CUDA)
    graph = dict(one.made)  # the captured step's own tensors
    for context in (100, 0, 511, 100):
        one.set_context(context)
        one.run()
        eager = {name: value.clone() for name, value in one.made.items()}
        for _ in range(2):
            replay()
            assert all(torch.equal(graph[name], value) for name, value in eager.items()), context
        assert bool((one.contexts > context).all())


def test_a_tiny_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "check_machine", lambda machine: None)  # others may run beside it
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "step", "--shape", "tiny", "--rows", "1,16,64", "--contexts", "0,2K"]
    assert cli.run([*arguments, "--split", "--repeats", "3", "--json", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 6 and all(row["graph"] and row["split"] for row in rows)
    assert "gate passed" in capsys.readouterr().out
