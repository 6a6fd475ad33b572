"""`kdtree bench step`: the floor's arithmetic, a rank's share, loads, output, a whole tiny run."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import allow_device_loops

from kdtree_engine import cli
from kdtree_engine.engine.measure import gate, step, table, timing, weights
from kdtree_engine.engine.measure.floor import (
    Step,
    Work,
    expected_distinct,
    floor_by_operator,
    floor_ms,
    step_work,
    total,
)
from kdtree_engine.engine.measure.shapes import KIMI_K26, TINY, shape, share
from kdtree_engine.errors import KDTreeError, OptionError
from kdtree_engine.model import load_target

MOE_LAYERS = 60

allow_device_loops()


def kimi_step(rows: int, context: int = 0, requests: int = 1) -> Step:
    hit = expected_distinct(384, 8, rows)
    return Step(rows, requests, context, [hit] * MOE_LAYERS)


@pytest.mark.parametrize(
    ("rows", "distinct", "gigabytes"),
    [
        (1, 8, 33), (2, 15.8, 45), (4, 31, 67), (8, 59.5, 110), (16, 110, 184), (32, 188, 301),
        (48, 244, 384), (64, 284, 444), (128, 358, 553), (256, 382, 589),
    ],
)  # fmt: skip
def test_bytes_of_the_whole_model(rows: int, distinct: float, gigabytes: float) -> None:
    """Rows, distinct experts a layer and GB a step, from the roofline that the design rests on."""
    assert expected_distinct(384, 8, rows) == pytest.approx(distinct, rel=0.01)
    found = total(step_work(KIMI_K26, kimi_step(rows)))
    assert found.bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_dense_bytes_by_kind() -> None:
    found: dict[str, float] = {}
    for name, work in step_work(KIMI_K26, kimi_step(1)):
        found[name] = found.get(name, 0.0) + work.bytes / 1e9
    attention = ("query_and_latent", "query_up", "absorb", "value_up", "output")
    assert sum(found[name] for name in attention) == pytest.approx(12.3, abs=0.05)
    assert found["attention"] == 0.0
    assert found["shared_expert"] == pytest.approx(5.3, abs=0.05)
    assert found["head"] == pytest.approx(2.35, abs=0.01)
    assert found["dense_mlp"] == pytest.approx(0.8, abs=0.01)
    assert found["router"] == pytest.approx(0.33, abs=0.01)
    expert = (found["experts_up"] + found["experts_down"]) / MOE_LAYERS / 8
    assert expert == pytest.approx(0.02477, rel=1e-3)


def test_context_is_read_once_a_request_and_met_by_every_row() -> None:
    config = share(KIMI_K26, 8)
    by_name = [
        dict(step_work(config, kimi_step(rows, 32_768, requests)))["attention"]
        for rows, requests in ((1, 1), (8, 1), (8, 8))
    ]
    assert by_name[0].bytes == 32_768 * 1152 == by_name[1].bytes == by_name[2].bytes / 8
    # 8 heads, 576 products for a score and 512 for the values, two operations each
    assert by_name[0].operations == 2 * 8 * 32_768 * (576 + 512)
    assert by_name[1].operations == 8 * by_name[0].operations == by_name[2].operations


def test_floor_takes_the_longer_of_bytes_and_operations_for_each_operator() -> None:
    work = [("a", Work(4e9, 1.0)), ("b", Work(1.0, 8e12)), ("a", Work(2e9, 4e12))]
    assert floor_ms(work, bandwidth_tbs=4.0, tflops=800.0) == pytest.approx(1.0 + 10.0 + 5.0)
    assert floor_by_operator(work, 4.0, 800.0) == pytest.approx({"a": 6.0, "b": 10.0})


def test_a_step_of_every_layer_needs_a_count_of_experts() -> None:
    with pytest.raises(AssertionError, match="more layers"):
        step_work(KIMI_K26, Step(1, 1, 0, [8.0] * 61))


def test_share_of_one_rank() -> None:
    config = share(KIMI_K26, 8)
    assert (config.num_heads, config.moe_intermediate_size, config.intermediate_size) == (
        8, 256, 2304,
    )  # fmt: skip
    assert config.vocab_size == 20_480 and config.num_experts == 384
    assert (config.q_lora_rank, config.kv_lora_rank, config.hidden_size) == (1536, 512, 7168)
    assert config.softmax_scale == KIMI_K26.softmax_scale
    everything = total(step_work(config, Step(1, 1, 0, [384.0] * MOE_LAYERS))).bytes
    embedding = config.vocab_size * config.hidden_size * 2
    assert 74e9 < everything + embedding < 78e9
    assert share(KIMI_K26, 1) == KIMI_K26
    with pytest.raises(OptionError, match="cannot be divided"):
        share(KIMI_K26, 7)


def test_shapes_by_name() -> None:
    assert shape("kimi-k2.6") == KIMI_K26 and shape("tiny", 2) == replace(TINY, num_layers=2)
    for name, layers in (("k3", None), ("tiny", 0), ("tiny", 4)):
        with pytest.raises(OptionError):
            shape(name, layers)


def test_zipf_loads_and_the_bias_that_makes_them() -> None:
    loads = weights.zipf_loads(384, 8)
    assert float(loads.sum()) == pytest.approx(8.0)
    assert float(loads.max()) <= 0.9 and bool((loads[1:] <= loads[:-1]).all())
    assert float(loads[9] / loads[19]) == pytest.approx(2.0)
    random = torch.Generator().manual_seed(0)
    scores = torch.sigmoid(torch.randn(20_000, 384, generator=random) * weights.LOGIT_SPREAD)
    bias = weights.zipf_bias(384, 8, weights.LOGIT_SPREAD)
    chosen = (scores + bias).topk(8, 1).indices
    counts = torch.bincount(chosen.flatten(), minlength=384) / len(scores)
    for first, end in ((0, 4), (4, 16), (16, 64), (64, 384)):
        assert float(counts[first:end].sum()) == pytest.approx(
            float(loads[first:end].sum()), rel=0.15
        )


def shapes(x: Any) -> Any:
    """Shapes and dtypes of every tensor in nested dataclasses and tuples; other values as are."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.dtype, x.stride()
    if is_dataclass(x) and not isinstance(x, type):
        return type(x), [shapes(getattr(x, one.name)) for one in fields(x)]
    return [shapes(one) for one in x] if isinstance(x, tuple) else x


@pytest.mark.parametrize("ranks", [1, 8])
def test_experts_made_in_place_are_like_those_that_are_loaded(ranks: int) -> None:
    config, cpu = share(TINY, ranks), torch.device("cpu")
    made = weights.random_target(config, torch.bfloat16, cpu, kernels=True)
    checkpoint = weights.RandomCheckpoint(config, cpu)
    loaded = load_target(checkpoint, torch.bfloat16, cpu, kernels=True)
    assert shapes(made) == shapes(loaded)
    assert made.layers[1].mlp.experts.up.scale is not None


def test_row_counts_and_numbers() -> None:
    assert table.numbers("0, 4K,33") == [0, 4096, 33]
    for wrong in ("", "1,", "-1", "1.5", "K", "9999999999", "²"):
        assert table.numbers(wrong) is None
    assert table.rows_per_request([1, 8, 64, 256, 1024], 8, 64) == [8, 64, 256]


def machine(**changes: Any) -> table.Machine:
    known = table.Machine("NVIDIA H200", "abc", "2.13", "3.6.0", 4.2, 790.0)
    return replace(known, **changes)


def test_a_slow_copy_voids_the_run() -> None:
    timing.check_machine(machine())
    timing.check_machine(machine(gpu="NVIDIA RTX PRO 6000", bandwidth_tbs=1.5))
    with pytest.raises(KDTreeError, match="void"):
        timing.check_machine(machine(bandwidth_tbs=3.99))


def test_time_by_kernel_and_grid() -> None:
    def event(name: str, us: float, grid: list[int] | None, cat: str = "kernel") -> dict[str, Any]:
        return {"cat": cat, "name": name, "dur": us, "args": {"grid": grid} if grid else {}}

    long = "void at::native::vectorized_elementwise_kernel<4, at::native::Add<long>, a::b<3>>(int)"
    events = [
        event("linear_parts", 6.0, [33, 4, 1]), event("linear_parts", 4.0, [24, 1, 1]),
        event("linear_parts", 2.0, [33, 4, 1]), event(long, 1.0, [2, 1, 1]),
        event("Memcpy DtoD", 3.0, None, "gpu_memcpy"), event("aten::add", 9.0, None, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    assert timing.kernel_times(events, repeats=2) == pytest.approx(
        {
            "linear_parts 33x4x1": 0.004, "linear_parts 24x1x1": 0.002, "Memcpy DtoD": 0.0015,
            "vectorized_elementwise_kernel 2x1x1": 0.0005,
        }
    )  # fmt: skip


def measurement(**changes: Any) -> table.Measurement:
    known = table.Measurement(
        "kimi-k2.6", 8, 61, 8, 4096, 1, 4.0, 3.0, 59.5, "uniform", "bfloat16", 20, True
    )
    return replace(known, **changes)


def test_json_line_and_table() -> None:
    line = table.json_line(measurement(), machine())
    row = json.loads(line)
    assert "\n" not in line and "split" not in row
    wanted = (
        "bench shape rank_of layers rows context requests ms floor_ms ratio bandwidth_tbs "
        "matmul_tflops distinct_experts routing gpu commit torch triton"
    )
    assert set(wanted.split()) <= row.keys()
    assert row["bench"] == "step" and row["ratio"] == 0.75 and row["all_reduce"] is False
    assert table.table_row(measurement()).split() == ["8", "4096", "4.000", "3.000", "0.75", "59.5"]
    assert len(table.table_row(measurement())) == len(table.HEADER)
    split = measurement(split={f"k{i}": float(i) for i in range(30)}, floor_split={"head": 0.5})
    assert json.loads(table.json_line(split, machine()))["split"]["k7"] == 7.0
    lines = table.split_rows(split)
    assert lines[1].split()[:2] == ["k29", "29.000"] and any("6 others" in one for one in lines)


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": (3,), "requests": 2}, {"rows": (65,)}, {"rows": ()}, {"requests": 0},
        {"contexts": (8192,)}, {"contexts": ()}, {"repeats": 0}, {"temperature": -1.0},
        {"routing": "flat"}, {"shape": "none"}, {"rank_of": 3},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_be(changed: dict[str, Any]) -> None:
    options = replace(step.Options("tiny", contexts=(0,), rows=(1,)), **changed)
    with pytest.raises(OptionError):
        config, _, _ = step.plan(options)
        weights.RandomCheckpoint(config, torch.device("cpu"), options.routing)


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_a_tiny_run(routing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "step", "--shape", "tiny", "--rank-of", "8", "--requests", "2"]
    arguments += ["--rows", "2,16", "--contexts", "0,100", "--repeats", "1", "--split"]
    arguments += ["--routing", routing, "--json", str(out)]
    assert cli.run(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["rows"], row["context"]) for row in rows] == [(2, 0), (2, 100), (16, 0), (16, 100)]
    for row in rows:
        assert row["ms"] > 0 and row["ratio"] > 0 and row["split"] and row["routing"] == routing
        assert 3 <= row["distinct_experts"] <= 12 and row["graph"] is False
    shown = capsys.readouterr().out
    assert "gate passed" in shown and "all-reduces" in shown and table.HEADER in shown


def test_every_repeat_is_the_same_step() -> None:
    """The context does not move, though each step commits its root."""
    target = step._build(share(TINY, 8), step.Options("tiny"), torch.float32, torch.device("cpu"))
    cache = step.random_cache(target, 2, 4, torch.float32)
    one = step.verification(target, cache, 2, 8, temperature=1.0)
    one.set_context(100)
    one.run()
    first = {name: value.clone() for name, value in one.made.items()}
    assert bool((one.contexts > 100).all())
    committed = cache.pool.latents[0].view(-1, target.config.latent_dim)
    slots = cache.pages[:, 1].long() * 64 + 100 - 64
    assert torch.equal(committed[slots], committed[one.slots[:, 0]])
    one.run()
    assert all(torch.equal(one.made[name], value) for name, value in first.items())


def test_the_step_on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in Triton's interpreter, against the same step on references."""
    config, cpu = replace(share(TINY, 8), num_layers=2), torch.device("cpu")
    made: list[dict[str, torch.Tensor]] = []
    for kernels in (False, True):
        checkpoint = weights.RandomCheckpoint(config, cpu)
        target = load_target(checkpoint, torch.float32, cpu, kernels=kernels)
        torch.manual_seed(0)
        one = step.verification(target, step.random_cache(target, 2, 3, torch.float32), 2, 4, 0.7)
        one.set_context(100)
        if kernels:
            for name, module in list(sys.modules.items()):
                if name.startswith("kdtree_engine.") and hasattr(module, "has_kernel"):
                    monkeypatch.setattr(module, "has_kernel", lambda x: True)
        distinct = step.distinct_experts(one)
        made.append({**one.made, "contexts": one.contexts, "distinct": torch.tensor(distinct)})
    wanted, got = made
    logits = [found.pop("logits") for found in made]
    assert (logits[0] - logits[1]).abs().max() < 2e-5 * logits[0].std()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_the_gate_refuses_other_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = gate._plain

    def off_by_a_bit(*given: Any) -> torch.Tensor:
        return torch.nextafter(plain(*given), torch.tensor(torch.inf))

    monkeypatch.setattr(gate, "_plain", off_by_a_bit)
    assert cli.run(["bench", "step", "--shape", "tiny", "--rows", "1", "--contexts", "0"]) == 1
    assert "differs from plain decoding" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--rows", "x"], ["--contexts", "1e3"], ["--shape", "huge"], ["--rank-of", "0"]],
    ids=" ".join,
)
def test_wrong_arguments_end_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "--shape" in arguments else ["--shape", "tiny"]
    assert cli.run(["bench", "step", *given, *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
