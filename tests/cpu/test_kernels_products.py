"""matmul, linear, experts and the probe behind them: near float64, rows exact by bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rowcheck import ROWS, assert_far, assert_near, assert_rows_exact
from torch import Tensor

from kdtree_engine.kernels import matmul
from kdtree_engine.kernels.experts import ExpertWeights, routed_experts
from kdtree_engine.kernels.experts.cases import CASES as EXPERT_CASES
from kdtree_engine.kernels.experts.cases import Case as ExpertCase
from kdtree_engine.kernels.linear import linear, pack_columns
from kdtree_engine.kernels.linear.cases import CASES as LINEAR_CASES
from kdtree_engine.kernels.linear.cases import Case as LinearCase
from kdtree_engine.kernels.matmul import probe
from kdtree_engine.kernels.matmul.cases import CASES as MATMUL_CASES
from kdtree_engine.kernels.matmul.cases import Case as MatmulCase

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cases(table: tuple) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", table, ids=[case.name for case in table])


def operands(case: MatmulCase, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Unit spread in the product; w a transposed view where the case says so."""
    x = randn(case.batch, rows, case.depth).to(dtype)
    w = (randn(case.batch, case.columns, case.depth, seed=1) * case.depth**-0.5).to(dtype)
    w = w.transpose(1, 2)
    return x, w if case.transposed else w.contiguous()


@DTYPES
@cases(MATMUL_CASES)
def test_row_bmm(case: MatmulCase, dtype: torch.dtype) -> None:
    x, w = operands(case, dtype)
    want = torch.einsum("bmk,bkn->bmn", x.double(), w.double())
    got = matmul.row_bmm(x, w)
    assert got.dtype == dtype
    assert_near(got, want, TOLERANCE[dtype])
    assert_far(matmul.row_bmm(x[..., :-1], w[:, :-1]), want, TOLERANCE[dtype] / 10)  # a key lost

    def rows_of(rows: Tensor) -> Tensor:
        return matmul.row_bmm(x[:, rows].contiguous(), w).transpose(0, 1)

    assert_rows_exact(rows_of)


@cases(MATMUL_CASES)
def test_row_bmm_does_not_mind_the_batch(case: MatmulCase) -> None:
    """An expert's product has the same bits whichever other experts run beside it."""
    x, w = operands(case, torch.float32, rows=5)
    whole = matmul.row_bmm(x, w)
    for index in range(case.batch):
        alone = matmul.row_bmm(x[index : index + 1], w[index : index + 1])
        assert torch.equal(alone, whole[index : index + 1])
    twice = matmul.row_bmm(torch.cat((x, x)), torch.cat((w, w)))
    assert torch.equal(twice[case.batch :], whole)


@DTYPES
@cases(LINEAR_CASES)
def test_linear(case: LinearCase, dtype: torch.dtype) -> None:
    weight = (randn(case.columns, case.depth) * case.depth**-0.5).to(dtype)
    packed = pack_columns(weight, dtype, "cpu")
    assert torch.equal(packed.matrix(), weight)  # packing is undone exactly
    x = randn(ROWS, case.depth, seed=1).to(dtype)
    want = x.double() @ weight.double().T
    assert_near(linear(x, packed), want, TOLERANCE[dtype])
    if case.columns > 1:
        assert_far(linear(x, pack_columns(weight.flip(0), dtype, "cpu")), want, TOLERANCE[dtype])
    assert_rows_exact(lambda rows: linear(x[rows], packed))


def expert_layer(case: ExpertCase, dtype: torch.dtype) -> ExpertWeights:
    gate_up = randn(case.experts, case.hidden, 2 * case.intermediate) * case.hidden**-0.5
    down = randn(case.experts, case.intermediate, case.hidden, seed=1) * case.intermediate**-0.5
    return ExpertWeights(gate_up.to(dtype), down.to(dtype))


def choices(case: ExpertCase, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Distinct experts a row, some far busier than others, and weights that sum to about 1."""
    popularity = torch.linspace(2.0, -2.0, case.experts)
    experts = (randn(ROWS, case.experts, seed=seed) + popularity).topk(case.top_k).indices
    return experts, torch.softmax(randn(ROWS, case.top_k, seed=seed + 1), -1)


def one_by_one(x: Tensor, experts: Tensor, weights: Tensor, layer: ExpertWeights) -> Tensor:
    """Float64, a row and an expert at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, (chosen, shares) in enumerate(zip(experts.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (x[row].double() @ layer.gate_up[expert].double()).chunk(2)
            out[row] += share * (gate * torch.sigmoid(gate) * up @ layer.down[expert].double())
    return out


@DTYPES
@cases(EXPERT_CASES)
def test_routed_experts(case: ExpertCase, dtype: torch.dtype) -> None:
    layer, (experts, weights) = expert_layer(case, dtype), choices(case)
    x = randn(ROWS, case.hidden, seed=5).to(dtype)
    want = one_by_one(x, experts, weights, layer)
    got = routed_experts(x, experts, weights, layer)
    assert got.dtype == torch.float32
    tolerance = TOLERANCE[dtype] * 2
    assert_near(got, want, tolerance)
    assert_far(routed_experts(x, experts.roll(1, 0), weights, layer), want, tolerance)
    if case.top_k > 1:
        assert_far(routed_experts(x, experts, weights.flip(1), layer), want, tolerance)
    assert_rows_exact(lambda rows: routed_experts(x[rows], experts[rows], weights[rows], layer))


def test_expert_outputs_are_added_in_the_order_of_choice() -> None:
    """Float32 addition is not associative: 1e8 - 1e8 + 1 is 1 in this order and 0 in the other."""
    values = torch.tensor([1e8, -1e8, 1.0])
    gate_up = torch.zeros(3, 1, 2)
    gate_up[:, 0, 0], gate_up[:, 0, 1] = 100.0, 0.01  # silu(100) * 0.01 = 1
    layer = ExpertWeights(gate_up, values.view(3, 1, 1))
    x, weights = torch.ones(4, 1), torch.ones(1, 3)
    for order, total in (((0, 1, 2), 1.0), ((0, 2, 1), 0.0), ((2, 1, 0), 0.0)):
        experts = torch.tensor([order])
        assert routed_experts(x[:1], experts, weights, layer).item() == total


# -------------------------------------------------------------------------------- the probe

SIGNATURE = (96, 40, torch.float32, False)


@pytest.fixture
def fresh_rules(monkeypatch: pytest.MonkeyPatch) -> dict:
    rules: dict = {}
    monkeypatch.setattr(probe, "_rules", rules)
    monkeypatch.setattr(probe, "_padded", {})
    return rules


@pytest.mark.parametrize(
    ("agrees", "rule"),
    [
        (lambda rows: True, matmul.RowRule(2)),
        (lambda rows: rows >= 4, matmul.RowRule(4)),
        (lambda rows: rows % 2 == 0, matmul.RowRule(2, 2)),
        (lambda rows: rows % 4 == 0, matmul.RowRule(4, 4)),
        (lambda rows: rows >= 8, matmul.RowRule(8)),
        (lambda rows: rows % 16 == 0, matmul.RowRule(16, 16)),
        (lambda rows: rows % 16 == 0 and rows < 256, matmul.RowRule(16, 16, block=16)),
        (lambda rows: False, matmul.RowRule(16, 16, block=16)),
    ],
    ids=["all", "from 4", "even", "by 4", "from 8", "by 16", "small only", "none"],
)
def test_probe_finds_the_cheapest_rule(
    agrees, rule: matmul.RowRule, fresh_rules: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(probe, "_agrees", lambda _, rows: asked.append(rows) or agrees(rows))
    assert matmul.row_rule(SIGNATURE) == rule
    assert fresh_rules == {SIGNATURE: rule}
    measured = len(asked)
    assert matmul.row_rule(SIGNATURE) == rule and len(asked) == measured  # measured once
    for rows in (1, 2, 3, 5, 9, 16, 17, 63, 200, 500):
        allowed = rule.rows(rows)
        assert allowed >= max(rows, rule.minimum) and allowed % rule.multiple == 0
        assert rule.block is not None or agrees(allowed)


def test_probe_sees_a_blas_that_rounds_the_end_of_large_calls(
    fresh_rules: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows of a call of over 64, those beyond a multiple of 4, are one bit off."""
    honest = torch.bmm

    def crooked(x: Tensor, w: Tensor) -> Tensor:
        out = honest(x.double(), w.double()).float()
        rows = x.shape[1]
        if rows > 64 and rows % 4:
            out[:, rows - rows % 4 :] = torch.nextafter(out, out + 1)[:, rows - rows % 4 :]
        return out

    monkeypatch.setattr(torch, "bmm", crooked)
    assert matmul.row_rule(SIGNATURE).multiple % 4 == 0
    x, w = randn(2, ROWS, 96), randn(2, 96, 40, seed=1)
    assert_rows_exact(lambda rows: matmul.row_bmm(x[:, rows].contiguous(), w).transpose(0, 1))


def test_products_larger_than_any_probed_call_are_cut(
    fresh_rules: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_rows(monkeypatch)
    x, w = randn(2, 2 * probe.MOST_ROWS + 3, 96), randn(2, 96, 40, seed=1)
    matmul.row_bmm(x[:, :4], w)  # measures
    seen.clear()
    out = matmul.row_bmm(x, w)
    assert max(seen) == probe.MOST_ROWS and sum(seen) >= x.shape[1]
    assert torch.allclose(out, x @ w, atol=1e-4)


def test_rules_are_forgotten_with_the_thread_count(fresh_rules: dict) -> None:
    fresh_rules[SIGNATURE] = matmul.RowRule(2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert matmul.padded_rows(1, CPU) == 4 and not fresh_rules
    finally:
        torch.set_num_threads(threads)
        matmul.padded_rows(1, CPU)


def test_probe_sees_a_blas_that_rounds_by_row_count(
    fresh_rules: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that is one bit off at odd row counts makes every call even."""
    honest = torch.bmm

    def crooked(x: Tensor, w: Tensor) -> Tensor:
        out = honest(x.double(), w.double()).float()
        return torch.nextafter(out, out + 1) if x.shape[1] % 2 else out

    monkeypatch.setattr(torch, "bmm", crooked)
    assert matmul.row_rule(SIGNATURE).multiple % 2 == 0
    x, w = randn(2, 9, 96), randn(2, 96, 40, seed=1)
    whole = matmul.row_bmm(x, w)
    for count in range(1, 10):
        assert torch.equal(matmul.row_bmm(x[:, :count], w), whole[:, :count])


def seen_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Row counts of every torch.bmm from now on."""
    honest, seen = torch.bmm, []
    monkeypatch.setattr(torch, "bmm", lambda x, w: seen.append(x.shape[1]) or honest(x, w))
    return seen


def test_fixed_blocks_where_nothing_agrees(
    fresh_rules: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_agrees", lambda *_: False)
    x, w = randn(3, ROWS, 96), randn(3, 96, 40, seed=1) * 96**-0.5
    seen = seen_rows(monkeypatch)
    want = torch.einsum("bmk,bkn->bmn", x.double(), w.double())
    seen.clear()
    assert_near(matmul.row_bmm(x, w), want, 5e-6)
    matmul.row_bmm(x[:, :3], w)
    matmul.row_bmm(x[:, :17], w)
    assert set(seen) == {16}
    assert_rows_exact(lambda rows: matmul.row_bmm(x[:, rows].contiguous(), w).transpose(0, 1))


def test_single_rows_where_places_differ(
    fresh_rules: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BLAS that rounds a row by its place mod 4, as one here does for unaligned rows."""
    honest = torch.bmm

    def crooked(x: Tensor, w: Tensor) -> Tensor:
        out = honest(x.double(), w.double()).float()
        out[:, 1::4] = torch.nextafter(out[:, 1::4], out[:, 1::4] + 1)
        return out

    monkeypatch.setattr(torch, "bmm", crooked)
    x, w = randn(3, ROWS, 96), randn(3, 96, 40, seed=1)
    assert_rows_exact(lambda rows: matmul.row_bmm(x[:, rows].contiguous(), w).transpose(0, 1))
    assert matmul.row_rule(SIGNATURE) == matmul.RowRule(2, 1, block=1)


def test_padded_rows_is_the_largest_need(fresh_rules: dict) -> None:
    assert [matmul.padded_rows(count, CPU) for count in (1, 4, 9)] == [4, 4, 9]
    fresh_rules[SIGNATURE] = matmul.RowRule(2)
    assert [matmul.padded_rows(count, CPU) for count in (1, 2, 9)] == [2, 2, 9]
    fresh_rules[(8, 8, torch.float32, True)] = matmul.RowRule(8, 8)
    assert [matmul.padded_rows(count, CPU) for count in (1, 8, 9)] == [8, 8, 16]
    assert matmul.padded_rows(9, torch.device("cuda")) == 9


@pytest.fixture
def natural() -> Iterator[None]:
    with matmul.free_of_contract():
        yield


@pytest.mark.usefixtures("natural")
def test_free_of_contract_takes_natural_rows(
    fresh_rules: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_rows(monkeypatch)
    matmul.row_bmm(randn(2, 1, 96), randn(2, 96, 40))
    assert seen == [1] and not fresh_rules
    assert matmul.padded_rows(3, CPU) == 3


def test_free_of_contract_ends_with_its_block() -> None:
    with pytest.raises(RuntimeError, match="inside"), matmul.free_of_contract():
        raise RuntimeError("inside")
    assert matmul.row_rule(SIGNATURE).minimum >= 2


def test_long_products_are_cut_into_segments_added_in_order() -> None:
    x, w = randn(2, 7, 1300), randn(2, 1300, 9, seed=1)
    parts = [
        matmul.row_bmm(x[..., a:b], w[:, a:b]) for a, b in ((0, 512), (512, 1024), (1024, 1300))
    ]
    assert torch.equal(matmul.row_bmm(x, w), parts[0] + parts[1] + parts[2])


def test_rowcheck_sees_a_row_that_depends_on_its_company() -> None:
    """The checker itself can fail: by one bit, and only for some row counts."""
    x = randn(ROWS, 4)
    with pytest.raises(AssertionError, match="differ"):
        assert_rows_exact(lambda rows: torch.nextafter(x[rows], x[rows] + (len(rows) == 17)))
    assert_rows_exact(lambda rows: x[rows])
