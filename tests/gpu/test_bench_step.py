"""`kdtree bench step` on CUDA: the gate, the engine's graph, the step free of the contract, and a
whole run of the tiny shape.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kdtree_engine import cli
from kdtree_engine.cache import CacheLayout
from kdtree_engine.config import DraftMask
from kdtree_engine.engine.measure import free, gate, products, step, weights
from kdtree_engine.engine.measure.decoding import brooms, decoding, random_pool
from kdtree_engine.engine.measure.shapes import KIMI_K26, TINY, drafter_shape, share

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("ranks", [1, 8])
@torch.inference_mode()
def test_rows_have_the_bits_of_plain_decoding(ranks: int) -> None:
    target = weights.random_target(share(TINY, ranks), torch.bfloat16, CUDA)
    gate.check_rows(target, torch.bfloat16)


@pytest.mark.parametrize("drafts", [False, True])
@torch.inference_mode()
def test_one_graph_for_every_context_and_every_repeat(drafts: bool) -> None:
    """Two layers of one rank's share of K2.6, eight requests."""
    config = replace(share(KIMI_K26, 8), num_layers=2)
    target = weights.random_target(config, torch.bfloat16, CUDA, "zipf")
    drafter = None
    if drafts:
        shape = replace(drafter_shape("kimi-k2.6", config), num_layers=1, masks=(DraftMask(),))
        drafter = weights.random_drafter(shape, torch.bfloat16, CUDA)
    pool = random_pool(
        target, CacheLayout(80, 8), torch.bfloat16, None if drafter is None else drafter.config
    )
    roots, blocks = brooms(8, 8, config.vocab_size)
    one = decoding(target, pool, 8, roots, blocks, 0.6, drafter)
    one.stand(100)
    one.engine.runner.keep_logits = True
    replay = one.captured()
    [graph] = one.engine.runner._graphs.values()
    places = torch.arange(8, device=CUDA)
    for context in (100, 0, 511, 100):
        one.stand(context)
        eager = one.operators()
        record, logits = eager.record.clone(), eager.logits.clone()
        for _ in range(2):
            one.reset()
            replay()
            assert torch.equal(graph.out.record, record), context
            assert torch.equal(graph.out.logits, logits), context
        assert bool((one.engine.state.at(places).context > context).all())


@torch.inference_mode()
def test_free_choices_compute_the_same_values() -> None:
    """Every way of every kind, at 8 and 64 rows, in bf16: close to the contract's logits."""
    config = replace(share(KIMI_K26, 8), num_layers=2)
    target = weights.random_target(config, torch.bfloat16, CUDA)
    pool = random_pool(target, CacheLayout(40, 1), torch.bfloat16)
    matrices = free.Matrices()
    for rows in (8, 64):
        draft = brooms(1, rows, config.vocab_size)
        one = decoding(target, pool, rows, *draft)
        one.stand(2000)
        wanted = one.operators().logits.clone()
        found = products.products(one)
        assert {product.name for product in found} >= {"qkv_a", "q_b", "o", "gate+shared", "head"}
        trials = [
            free.Choices({(p.rows, p.weight.columns, p.weight.depth): way for p in found})
            for way in (0, 2, 16)
        ]
        trials += free.attention_trials(free.Choices(), target, 2000)
        trials += free.expert_trials(free.Choices(), target, 2000)
        for choices in trials:
            with free.free_of_contract(choices, matrices):
                other = decoding(target, pool, rows, *draft)
                other.stand(2000)
                other.engine.runner.keep_logits = True
                replay = other.captured()
            other.reset()
            replay()
            [graph] = other.engine.runner._graphs.values()
            # An expert chosen otherwise at a near-tie changes a row: most must agree.
            apart = (graph.out.logits - wanted).norm(dim=1) / wanted.norm(dim=1)
            assert float(apart.median()) < 0.05, (rows, choices)


def test_a_tiny_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "check_machine", lambda machine: None)  # others may run beside it
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "step", "--shape", "tiny", "--rows", "1,16,64", "--contexts", "0,2K"]
    arguments += ["--split", "--drafter", "--free", "--repeats", "3", "--json", str(out)]
    assert cli.run(arguments) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [line for line in lines if line["bench"] == "step"]
    assert len(rows) == 6 and all(row["graph"] and row["split"] for row in rows)
    assert all("head" in " ".join(row["operators"]) for row in rows)
    assert len(lines) == 12
    assert "gate passed" in capsys.readouterr().out
