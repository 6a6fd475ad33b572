"""`kdtree bench step`: the floor's arithmetic, a rank's share, loads, output, a whole tiny run; and
the same step free of the contract.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.pretend import Pretend
from interpreter import allow_device_loops

from kdtree_engine import cli
from kdtree_engine.cache import CacheLayout
from kdtree_engine.engine import memory
from kdtree_engine.engine.measure import free, gate, products, step, table, timing, warm, weights
from kdtree_engine.engine.measure.decoding import (
    HORIZON,
    Decoding,
    brooms,
    decoding,
    distinct_experts,
    random_pool,
)
from kdtree_engine.engine.measure.floor import (
    Step,
    Work,
    drafter_work,
    expected_distinct,
    floor_by_operator,
    floor_ms,
    step_work,
    total,
)
from kdtree_engine.engine.measure.shapes import KIMI_K26, TINY, drafter_shape, shape, share
from kdtree_engine.errors import KDTreeError, OptionError
from kdtree_engine.kernels import linear
from kdtree_engine.kernels.linear import PackedLinear, random_linear
from kdtree_engine.kernels.mla_attention import launch as attention
from kdtree_engine.kernels.tree_build import TreePlaces, plan_trees
from kdtree_engine.model import load_target, moe

MOE_LAYERS = 60
CPU = torch.device("cpu")

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


def test_one_head_is_laid_out_like_several() -> None:
    config = replace(share(TINY, 16), num_layers=1)
    layer = weights.random_target(config, torch.float32, CPU, kernels=True).layers[0].attention
    nope, latent, value = config.nope_dim, config.kv_lora_rank, config.v_dim
    assert config.num_heads == 1 and layer.key_up.shape == (1, nope, latent)
    assert layer.key_up.stride() == (nope * latent, 1, nope)
    assert layer.value_up.shape == (1, latent, value)
    assert layer.value_up.stride() == (latent * value, 1, latent)


def test_the_drafter_is_whole_on_every_rank() -> None:
    target = share(KIMI_K26, 8)
    drafter = drafter_shape("kimi-k2.6", target)
    assert (drafter.vocab_size, drafter.mask_token_id) == (20_480, 20_478)
    assert drafter.tap_layers == (1, 12, 24, 35, 47, 58)
    short = drafter_shape("kimi-k2.6", replace(target, num_layers=5))
    assert short.tap_layers == (1, 4, 4, 4, 4, 4)

    def bytes_of(rows: int, context: int) -> float:
        return total(drafter_work(drafter, target, Step(rows, 1, context, []))).bytes

    head = target.vocab_size * 7168 * 2
    # The published checkpoint's 6.48 GiB. Keys and values come twice: of what was committed, and
    # of the block.
    again = 6 * 2 * 8 * 128 * 7168 * 2
    assert bytes_of(8, 0) - head - again == pytest.approx(6.4807 * 2**30, rel=1e-4)
    assert bytes_of(8, 100_000) - bytes_of(8, 0) == 6 * 4096 * 2 * 8 * 128 * 2
    assert bytes_of(1, 4096) == 43_008 * 7168 * 2 + again


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


def test_operators_join_grids_and_name_products_by_weight() -> None:
    def product(name: str, columns: int, rows: int = 8) -> products.Product:
        return products.Product(name, random_linear(columns, 512, torch.bfloat16, CPU, 1.0), rows)

    found = [product("o", 7168), product("q_b", 1536), product("dense_down", 7168)]
    found += [product("o", 7168)]
    segments = found[1].weight.segments
    assert segments > 1
    split = {
        "linear_parts 112x1x1": 1.0, f"linear_parts 24x{segments}x1": 2.0,
        "linear_parts 7x7x7": 4.0, "add_norm_rows 8x1x1": 8.0, "add_norm_rows 1x1x1": 16.0,
        "Memcpy DtoD": 32.0,
    }  # fmt: skip
    assert products.by_operator(split, found) == {
        "o, dense_down": 1.0, "q_b": 2.0, "linear_parts": 4.0, "add_norm_rows": 24.0,
        "Memcpy": 32.0,
    }  # fmt: skip


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
    assert row["gate"] is True and row["drafter"] is False
    assert table.table_row(measurement()).split() == ["8", "4096", "4.000", "3.000", "0.75", "59.5"]
    assert len(table.table_row(measurement())) == len(table.HEADER)
    split = measurement(
        split={f"k{i}": float(i) for i in range(30)},
        operators={"o": 2.0},
        floor_split={"head": 0.5},
    )
    assert json.loads(table.json_line(split, machine()))["split"]["k7"] == 7.0
    lines = table.split_rows(split)
    assert lines[1].split()[:2] == ["o", "2.000"] and lines[3].split()[:2] == ["k29", "29.000"]
    assert any("14 others" in one for one in lines)


def test_the_price_in_words_and_as_json() -> None:
    found = table.Price(measurement(), 4.1, 4.0, {"o": "by cuBLAS", "experts": "in 1"})
    row = json.loads(table.price_line(found, machine()))
    assert row["bench"] == "price" and row["price"] == pytest.approx(0.025)
    assert (row["ms_contract"], row["ms_free"], row["rows"], row["gpu"]) == (
        4.1, 4.0, 8, "NVIDIA H200",
    )  # fmt: skip
    assert row["choices"] == {"o": "by cuBLAS", "experts": "in 1"} and row["gate"] is True
    assert "price 2.5%" in table.price_row(found) and "o by cuBLAS" in table.price_row(found)


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


@pytest.mark.parametrize(("routing", "more"), [("uniform", ["--drafter", "--free"]), ("zipf", [])])
def test_a_tiny_run(
    routing: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "step", "--shape", "tiny", "--rank-of", "8", "--requests", "2"]
    arguments += ["--rows", "2,16", "--contexts", "0,100", "--repeats", "1", "--split"]
    arguments += ["--routing", routing, "--json", str(out), *more]
    assert cli.run(arguments) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [line for line in lines if line["bench"] == "step"]
    assert [(row["rows"], row["context"]) for row in rows] == [(2, 0), (2, 100), (16, 0), (16, 100)]
    for row in rows:
        assert row["ms"] > 0 and row["ratio"] > 0 and row["split"] and row["routing"] == routing
        assert 3 <= row["distinct_experts"] <= 12 and row["graph"] is False
        assert row["drafter"] is ("--drafter" in more) and row["operators"]
        assert ("draft_observe" in row["floor_split"]) is ("--drafter" in more)
    prices = [line for line in lines if line["bench"] == "price"]
    assert len(prices) == (4 if "--free" in more else 0)
    assert all(price["ms_free"] > 0 and price["choices"] == {} for price in prices)
    shown = capsys.readouterr().out
    assert "gate passed" in shown and "all-reduces" in shown and table.HEADER in shown


def test_kernels_are_compiled_by_processes_of_their_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said: list[str] = []
    options = step.Options("tiny", 8, requests=2, contexts=(0,), drafter=True)
    warm.warm(options, [2, 8], said.append)
    assert len(said) == 1 and said[0].startswith("compiled in"), capfd.readouterr().err
    warm.warm(options, [3], said.append)  # two requests do not share three rows
    assert said[-1].endswith("steps of [3] rows")
    assert "--rows" in capfd.readouterr().err


@pytest.mark.parametrize("rows", [2, 4, 8, 9, 64])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_broom_is_a_chain_and_siblings_of_different_tokens(rows: int, requests: int) -> None:
    roots, blocks = brooms(requests, rows, vocab=256)
    places = TreePlaces(
        torch.tensor(roots),
        torch.zeros(requests, dtype=torch.int32),
        torch.zeros(requests, dtype=torch.int64),
    )
    planned = plan_trees(blocks.log_probs, blocks.tokens, rows - 1, places, 1000)
    chain = min(HORIZON, rows - 1)
    for depths in planned.trees.depths.tolist():
        assert depths == [*range(chain + 1), *[1] * (rows - 1 - chain)]
    assert planned.rows.tokens.unique().numel() == rows * requests
    assert brooms(1, 64, vocab=32)[1].tokens.max() < 32


def subject(requests: int, rows: int, temperature: float = 0.0, **options: Any) -> Decoding:
    """A step of the tiny shape, each request at position 100."""
    config = replace(share(TINY, 8), **options)
    target = weights.random_target(config, torch.float32, CPU)
    torch.manual_seed(0)
    pool = random_pool(target, CacheLayout(4 * requests, requests), torch.float32)
    found = decoding(
        target, pool, rows, *brooms(requests, rows, config.vocab_size), temperature=temperature
    )
    found.stand(100)
    return found


@torch.inference_mode()
def test_rows_choose_experts_as_if_independent() -> None:
    """Also through many layers, where rows over one context grow alike."""
    config = replace(
        KIMI_K26, vocab_size=1024, hidden_size=256, num_layers=20, num_heads=4, q_lora_rank=64,
        kv_lora_rank=64, nope_dim=16, rope_dim=16, v_dim=16, intermediate_size=128,
        moe_intermediate_size=32, num_experts=96, experts_per_token=4, max_positions=4096,
    )  # fmt: skip
    target = weights.random_target(config, torch.float32, CPU, embedding=weights.APART)
    pool = random_pool(target, CacheLayout(10, 1), torch.float32)
    for rows in (8, 32):
        one = decoding(target, pool, rows, *brooms(1, rows, config.vocab_size))
        for context in (0, 500):
            one.stand(context)
            found = distinct_experts(one)
            wanted = expected_distinct(96, 4, rows)
            assert len(found) == 19
            assert sum(found) / 19 == pytest.approx(wanted, rel=0.06), (rows, context)
            assert sum(found[-5:]) / 5 == pytest.approx(wanted, rel=0.12), (rows, context)


@torch.inference_mode()
def test_every_repeat_is_the_same_step() -> None:
    """The requests are set back, though each step moves them and commits their roots."""
    one = subject(2, 8, temperature=1.0)
    state, pool = one.engine.state, one.engine.pool
    one.engine.runner.keep_logits = True
    first = one.launch()
    places = torch.arange(2)
    assert bool((state.at(places).context > 100).all())
    committed = pool.latents[0].view(-1, one.engine.target.config.latent_dim)
    standing = state.at(places)
    slots = standing.pages[:, 1].long() * 64 + 100 - 64
    assert torch.equal(committed[slots], committed[standing.scratch])
    again = one.launch()
    assert first.logits is not None and again.logits is not None
    assert torch.equal(first.logits, again.logits)
    for left, right in zip(first.records, again.records, strict=True):
        assert left.emitted == right.emitted and torch.equal(left.tree.tokens, right.tree.tokens)
    one.reset()
    assert state.at(places).context.tolist() == [100, 100]


@torch.inference_mode()
def test_what_is_replayed_is_the_engines_graph() -> None:
    one = subject(2, 8)
    engine = one.engine
    engine.runner = Pretend(engine, 2, eager=False)
    engine.runner.captures = True
    replay = one.captured()
    graph = next(iter(engine.runner._graphs.values()))
    assert replay == graph.graph.replay and len(engine.runner._graphs) == 1
    one.stand(37)
    one.reset()
    logits = one.operators().logits
    one.reset()
    replay()
    assert torch.equal(graph.out.logits, logits)


def on_kernels(target: Any, monkeypatch: pytest.MonkeyPatch, requests: int) -> Decoding:
    """Four rows a request, in kernels where the target is laid out for them."""
    torch.manual_seed(0)
    pool = random_pool(target, CacheLayout(3 * requests, requests), torch.float32)
    draft = brooms(requests, 4, target.config.vocab_size)
    one = decoding(target, pool, 4, *draft, temperature=0.7)
    one.stand(100)
    if isinstance(target.head, PackedLinear):
        for name, module in list(sys.modules.items()):
            if name.startswith("kdtree_engine.") and hasattr(module, "has_kernel"):
                monkeypatch.setattr(module, "has_kernel", lambda x: True)
    return one


@torch.inference_mode()
def test_the_step_on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in Triton's interpreter, against the same step on references."""
    config = replace(share(TINY, 8), num_layers=2)
    made = []
    for kernels in (False, True):
        checkpoint = weights.RandomCheckpoint(config, CPU)
        target = load_target(checkpoint, torch.float32, CPU, kernels=kernels)
        one = on_kernels(target, monkeypatch, requests=2)
        distinct = distinct_experts(one)
        out = one.operators()
        made.append((out.logits, out.record, distinct, bool(products.products(one))))
    (wanted, record, distinct, _), got = made
    assert (wanted - got[0]).abs().max() < 2e-5 * wanted.std()
    assert distinct == got[2] and [one[3] for one in made] == [False, True]
    scores = 4  # the tree's, float64 as bits
    assert torch.equal(record[:, :-scores], got[1][:, :-scores])


@torch.inference_mode()
def test_free_choices_are_made_swapped_in_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways to add up the same: other bits, the same values."""
    narrow = replace(share(TINY, 8), num_layers=2, num_experts=4, experts_per_token=1)
    config = replace(narrow, hidden_size=1024)  # experts' K is cut from there on
    target = weights.random_target(config, torch.float32, CPU, kernels=True)
    one = on_kernels(target, monkeypatch, requests=1)

    def swapped() -> list[Any]:
        return [linear._launch_parts, attention.tiling, moe.expert_mlp]

    before = swapped()
    wanted = one.operators().logits
    found = products.products(one)
    assert {"qkv_a", "q_b", "o", "gate+shared", "dense_down", "head"} <= {p.name for p in found}
    calls: list[Any] = []
    monkeypatch.setattr(free, "captured", lambda call, device: call)
    monkeypatch.setattr(free, "median_ms", lambda call, *rest: calls.append(call) or -len(calls))
    matrices = free.Matrices()
    dense = free.dense_choices(found, target.head, matrices)  # each way was faster than the last
    assert dense and {0} <= set(dense.values()) and len(calls) > 2 * len(dense)
    dense[4, found[0].weight.columns, 1024] = 4
    [blocks, *_] = free.attention_trials(free.Choices(dense), target, 256)
    [choices, *_] = free.expert_trials(blocks, target, 256)
    assert (choices.attention, choices.experts) == (128, 1)
    one.reset()
    with free.free_of_contract(choices, matrices):
        calls[0]()
        assert all(x != y for x, y in zip(swapped(), before, strict=True))
        logits = one.operators().logits
    assert swapped() == before
    assert (wanted - logits).abs().max() < 1e-4 * wanted.std()
    assert not torch.equal(wanted, logits)
    one.reset()
    assert torch.equal(one.operators().logits, wanted)


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


def test_the_large_shape_needs_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once and in one line; and what memory cannot hold is refused before it is made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(["bench", "step", "--shape", "kimi-k2.6"]) == 2
    assert capsys.readouterr().err.startswith("kdtree: --shape kimi-k2.6 needs a CUDA GPU")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    assert cli.run(["bench", "step", "--shape", "tiny", "--contexts", "0"]) == 1
    assert "the weights take" in capsys.readouterr().err
