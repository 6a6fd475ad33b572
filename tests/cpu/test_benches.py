"""The benches: a quick run gives valid rows, and the gate refuses output that differs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kdtree_engine import LLM, SamplingParams

BENCHES = Path(__file__).resolve().parents[2] / "benches"
MODULES = ("gate", "peer", "report", "settings", "decode")


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, ModuleType]]:
    """The bench scripts as modules, under names that leave with the test module."""
    sys.path.insert(0, str(BENCHES))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path[:] = [entry for entry in sys.path if entry != str(BENCHES)]
        for name in MODULES:
            sys.modules.pop(name, None)


def test_a_quick_run_gives_valid_rows(benches: dict[str, ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "decode.jsonl"
    command = [sys.executable, str(BENCHES / "decode.py"), "--quick", "--device", "cpu"]
    command += ["--threads", "1"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {(row["row"], row["temperature"]) for row in rows}
    for temperature in (0.0, 1.0):
        assert {(n, temperature) for n in ("plain", "tree 15", "ngram tree 15")} <= names
    assert ("plain, natural rows", 0.0) in names
    assert any(name.startswith("transformers, ") for name, _ in names)
    for row in rows:
        assert row["gate"] == "passed" and row["environment"]["commit"]
        assert row["environment"]["threads"] == 1
        assert row["tokens_per_s"] > 0 and row["times_floor"] > 1
        ratio = row["speed_over_plain"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        if row["row"] == "plain":
            assert row["tokens_per_step"] == 1.0 and ratio["median"] == 1.0
        if row["row"] == "tree 15":
            assert row["tokens_per_step"] > 1.0
            assert row["outputs_equal_to_plain"] == "2/2"
            phases = sum(row["phases_ms_per_step"].values())
            assert 0.8 * row["ms_per_step"] < phases < 1.05 * row["ms_per_step"]
    assert done.stdout.count("\n") == len(rows) + 2
    page = tmp_path / "page.md"
    page.write_text("before\n")
    for _ in range(2):
        benches["report"].write_docs(out, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.count("| tree 15 | 0 |") == 1
    assert "### On a GPU" not in text
    with out.open("a") as lines:
        lines.writelines(json.dumps(on_a_gpu(row)) + "\n" for row in rows)
        lines.writelines(json.dumps({**row, "run": "later"}) + "\n" for row in rows)
    benches["report"].write_docs(out, page)
    text = page.read_text()
    own, gpu = text.split("### On a GPU")
    assert "H200" not in own and own.count("| tree 15 | 0 |") == 1
    assert "Some H200, Triton 3.6.0" in gpu and "4.12 TB/s" in gpu and "by phase" not in gpu
    assert "commit unknown" in gpu and text.count("transformers was left out") == 1


def on_a_gpu(row: dict[str, Any]) -> dict[str, Any]:
    """What a run there writes, its figures aside."""
    facts = {**row["environment"], "gpu": "Some H200", "triton": "3.6.0", "commit": None}
    facts |= {"copy_tbs": 4.123, "transformers_left_out": "it is slow"}
    del facts["transformers_experts"]
    phases = {"step": row["ms_per_step"]}
    changed = {"device": "cuda", "dtype": "bfloat16", "run": "gpu", "environment": facts}
    return {**row, **changed, "phases_ms_per_step": phases}


def test_the_plan_of_a_gpu(benches: dict[str, ModuleType]) -> None:
    plan = benches["decode"].Plan().on_cuda()
    assert [str(machine) for machine in plan.machines] == [
        "plain", "chain:7", "tree 7", "tree 15", "tree 31", "tree 63", "ngram tree 15",
    ]  # fmt: skip
    assert plan.timed_temperatures == (0.0, 0.7, 1.0)
    assert not plan.peer and not plan.natural and plan.device == "cuda"


def test_a_graph_captured_while_timing_voids_the_run(
    benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, gate = benches["decode"], benches["gate"]
    bench = decode.Bench(decode.QUICK)
    bench.pass_gate()
    graphs = bench.llms[decode.PLAIN].engine.runner._graphs
    timed = bench._time

    def capturing(*given: Any) -> Any:
        graphs[len(graphs)] = None
        return timed(*given)

    monkeypatch.setattr(bench, "_time", capturing)
    with pytest.raises(gate.GateError, match="void"):
        bench.measure(None, [])


@pytest.fixture(scope="module")
def llms() -> tuple[LLM, LLM]:
    """Plain decoding and a tree of the packaged model."""
    return LLM(device="cpu", drafter="none", tree_nodes=0), LLM(device="cpu", tree_nodes=7)


def test_decoded_logits_belong_to_the_tokens(
    benches: dict[str, ModuleType], llms: tuple[LLM, LLM]
) -> None:
    gate, params = benches["gate"], SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = list(range(300, 340))
    plain, tree = (gate.decoded_logits(llm, prompt, params) for llm in llms)
    gate.require_equal_logits("a tree", plain, tree)
    assert plain.argmax(1).tolist() == llms[0].generate(prompt, params)[0].token_ids
    assert not llms[0].engine.runner.keep_logits  # what is timed keeps nothing


def test_the_gate_refuses_a_changed_bit(benches: dict[str, ModuleType]) -> None:
    gate = benches["gate"]
    logits = torch.randn(3, 5)
    changed = logits.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(torch.inf))
    gate.require_equal_logits("same", logits, logits.clone())
    with pytest.raises(gate.GateError, match=r"1 of 3 rows differ.*nothing was timed"):
        gate.require_equal_logits("tree 15", logits, changed)
    with pytest.raises(gate.GateError, match="shapes"):
        gate.require_equal_logits("tree 15", logits, logits[:2])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([[1, 2, 3], [4, 9, 6]], "token 1 of prompt 1"),
        ([[1, 2, 3], [4, 5]], "token 2 of prompt 1"),
        ([[1, 2, 3]], "1 outputs for 2 prompts"),
    ],
)
def test_the_gate_refuses_other_tokens(
    benches: dict[str, ModuleType], found: list[list[int]], message: str
) -> None:
    gate = benches["gate"]
    with pytest.raises(gate.GateError, match=message):
        gate.require_equal_tokens("tree 15", [[1, 2, 3], [4, 5, 6]], found)


class Negated:
    """A target whose likeliest token is the worst wherever a step has several rows."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, *args: Any) -> Any:
        out = self._target.forward(*args)
        if out.logits.shape[0] > 1:
            out.logits.neg_()
        return out


def test_a_planted_difference_stops_the_bench(
    benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, gate = benches["decode"], benches["gate"]
    bench = decode.Bench(decode.QUICK)
    broken = bench.llms[decode.TREES[2]].engine
    monkeypatch.setattr(broken, "target", Negated(broken.target))
    with pytest.raises(gate.GateError, match=r"tree 15 at T=0 differs .* nothing was timed"):
        bench.pass_gate()


def test_rounds_are_interleaved(benches: dict[str, ModuleType]) -> None:
    seen: list[tuple[str, int]] = []

    def measure(name: str, turn: int) -> int:
        seen.append((name, turn))
        return turn

    found = benches["gate"].interleaved(["a", "b", "c"], range(8), measure)
    assert found == {name: list(range(8)) for name in "abc"}
    assert [turn for _, turn in seen] == [turn for turn in range(8) for _ in range(3)]
    orders = {tuple(n for n, _ in seen[i : i + 3]) for i in range(0, 24, 3)}
    assert len(orders) > 1
    ratio = benches["gate"].paired_ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    assert ratio == {"median": 3.0, "low": 2.0, "high": 4.0}


def test_distinct_share(benches: dict[str, ModuleType]) -> None:
    share = benches["settings"].distinct_share
    assert share(range(10)) == 1.0
    assert share([1, 2] * 20) == 2 / 37
    assert share([1, 2]) == 1.0
