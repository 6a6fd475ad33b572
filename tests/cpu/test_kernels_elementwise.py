"""rms_norm, rope, swiglu, router and top_k: near float64, and each row exact by bits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rowcheck import ROWS, assert_far, assert_near, assert_rows_exact
from torch import Tensor

from golden import model as golden
from kdtree_engine.config import RopeConfig
from kdtree_engine.kernels import rms_norm as norms
from kdtree_engine.kernels import rope as ropes
from kdtree_engine.kernels import router as routers
from kdtree_engine.kernels import swiglu as gates
from kdtree_engine.kernels import top_k as tops
from kdtree_engine.kernels.rms_norm.cases import CASES as NORM_CASES
from kdtree_engine.kernels.rms_norm.cases import Case as NormCase
from kdtree_engine.kernels.rope.cases import CASES as ROPE_CASES
from kdtree_engine.kernels.rope.cases import Case as RopeCase
from kdtree_engine.kernels.router.cases import CASES as ROUTER_CASES
from kdtree_engine.kernels.router.cases import Case as RouterCase
from kdtree_engine.kernels.swiglu.cases import CASES as GATE_CASES
from kdtree_engine.kernels.swiglu.cases import Case as GateCase
from kdtree_engine.kernels.top_k.cases import CASES as TOP_CASES
from kdtree_engine.kernels.top_k.cases import Case as TopCase

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-2}
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])


def cases(table: tuple) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", table, ids=[case.name for case in table])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@cases(NORM_CASES)
def test_rms_norm(case: NormCase, dtype: torch.dtype) -> None:
    scales = torch.logspace(-1, 1, ROWS)[:, None]  # rows of different size, all ending near 1
    x = (randn(ROWS, case.width) * scales).to(dtype)
    weight = (1 + 0.2 * randn(case.width, seed=1)).to(dtype)
    wide = x.double()
    size = (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    want = wide / size * weight.double()
    assert_near(norms.rms_norm(x, weight, 1e-6), want, TOLERANCE[dtype] * 4)
    if dtype == torch.float32:
        assert_far(norms.rms_norm(x, weight, 1e-3), want, TOLERANCE[dtype] * 4)
        assert_far(norms.rms_norm(x, weight.flip(0), 1e-6), want, TOLERANCE[dtype] * 4)
    assert_rows_exact(lambda rows: norms.rms_norm(x[rows], weight, 1e-6))
    # A slice of a wider product, as the latent is: the same bits as a copy.
    joined = torch.cat((x, x), 1)
    assert torch.equal(
        norms.rms_norm(joined[:, case.width :], weight, 1e-6), norms.rms_norm(x, weight, 1e-6)
    )


@DTYPES
@cases(GATE_CASES)
def test_swiglu(case: GateCase, dtype: torch.dtype) -> None:
    x = (2 * randn(ROWS, case.width)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    want = gate / (1 + torch.exp(-gate)) * up
    assert_near(gates.swiglu(x), want, TOLERANCE[dtype] * 4)
    assert_far(gates.swiglu(torch.cat(x.chunk(2, -1)[::-1], -1)), want, TOLERANCE[dtype])
    assert_rows_exact(lambda rows: gates.swiglu(x[rows]))


def test_swiglu_of_large_gates_stays_finite() -> None:
    x = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert gates.swiglu(x).tolist() == [[0.0, 0.0, 0.0, 90.0, 200.0]]


def golden_rope(rope: RopeConfig) -> golden.Rope:
    return golden.Rope(
        rope.theta,
        rope.kind == "yarn",
        rope.factor,
        rope.original_max_positions,
        rope.beta_fast,
        rope.beta_slow,
        rope.mscale,
        rope.mscale_all_dim,
        rope.attention_factor,
    )


def turns(case: RopeCase, positions: Tensor) -> Tensor:
    """exp(i angle) of each pair, complex128 [R, 1, D/2], from the golden model's frequencies."""
    frequencies = torch.from_numpy(golden.inverse_frequencies(golden_rope(case.rope), case.dim))
    angles = positions.double()[:, None, None] * frequencies
    return torch.complex(angles.cos(), angles.sin())


def rotate(x: Tensor, rope: RopeConfig, positions: Tensor, interleaved: bool = True) -> Tensor:
    """x [R, heads, D] through the operator, with a table of 5,000 positions."""
    table = ropes.rope_table(rope, x.shape[-1], 5000, CPU, interleaved=interleaved)
    angles = table.at(positions).over_heads()
    return (ropes.rotate_interleaved if interleaved else ropes.rotate_half)(x, angles)


@cases(ROPE_CASES)
def test_inverse_frequencies(case: RopeCase) -> None:
    frequencies = torch.from_numpy(golden.inverse_frequencies(golden_rope(case.rope), case.dim))
    got = ropes.inverse_frequencies(case.rope, case.dim)
    assert torch.allclose(got, frequencies, rtol=1e-14)
    if case.rope.kind == "yarn":  # the factor matters, and so do the ends of the ramp
        for change in ({"factor": 2.0}, {"beta_fast": 8.0}, {"kind": "default"}):
            other = ropes.inverse_frequencies(replace(case.rope, **change), case.dim)
            assert not torch.allclose(other, frequencies, rtol=1e-3)


@DTYPES
@cases(ROPE_CASES)
def test_rotations(case: RopeCase, dtype: torch.dtype) -> None:
    """Neighbouring pairs and halves, as products of complex numbers; past the original length."""
    positions = torch.randint(1, 5000, (ROWS,), generator=torch.Generator().manual_seed(2))
    x = randn(ROWS, 3, case.dim, seed=3).to(dtype)
    turn = turns(case, positions)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * turn
    want = torch.view_as_real(pairs).flatten(-2)
    tolerance = TOLERANCE[dtype]
    assert_near(rotate(x, case.rope, positions), want, tolerance)
    halves = torch.complex(*x.double().chunk(2, -1)) * turn
    half_want = torch.cat((halves.real, halves.imag), -1)
    assert_near(rotate(x, case.rope, positions, interleaved=False), half_want, tolerance)
    for mistake in (half_want, rotate(x, case.rope, positions - 1)):
        assert_far(mistake, want, tolerance)
    for interleaved in (True, False):
        assert_rows_exact(
            lambda rows, way=interleaved: rotate(x[rows], case.rope, positions[rows], way)
        )


def test_amplitude_multiplies_cos_and_sin() -> None:
    """Pain point 4: YaRN's amplitude is the config's formula, or exactly what is asked for."""
    yarn = RopeConfig(10000.0, "yarn", 40.0, 64, mscale=1.0, mscale_all_dim=0.707)
    formula = (0.1 * math.log(40.0) + 1) / (0.0707 * math.log(40.0) + 1)
    x, positions = randn(9, 2, 8), torch.arange(9)
    for way in (True, False):
        plain = rotate(x, replace(yarn, mscale_all_dim=1.0), positions, way)
        assert torch.equal(plain[0], x[0])  # equal mscales: an amplitude of 1
        for rope, amplitude in ((yarn, formula), (replace(yarn, attention_factor=1.25), 1.25)):
            assert torch.allclose(rotate(x, rope, positions, way), plain * amplitude, rtol=1e-5)


def route_by_hand(logits: Tensor, bias: Tensor, s: routers.RouterSettings) -> tuple[Tensor, Tensor]:
    """The golden model's router; equal choices go to the smaller index."""
    config = {
        "n_group": s.groups,
        "topk_group": s.top_groups,
        "num_experts_per_tok": s.top_k,
        "norm_topk_prob": s.normalise,
        "routed_scaling_factor": s.scale,
    }
    experts, weights = golden.route(config, logits.double().numpy(), bias.double().numpy())
    return torch.from_numpy(experts), torch.from_numpy(weights)


@cases(ROUTER_CASES)
def test_router(case: RouterCase) -> None:
    logits, bias = randn(ROWS, case.experts), 0.3 * randn(case.experts, seed=4)
    experts, weights = routers.route(logits, bias, case.settings)
    want_experts, want = route_by_hand(logits, bias, case.settings)
    assert torch.equal(experts, want_experts)
    assert_near(weights, want, 1e-5)
    if case.settings.normalise:
        assert torch.allclose(weights.sum(1), torch.tensor(case.settings.scale))
    without_bias, _ = route_by_hand(logits, 0 * bias, case.settings)
    assert not torch.equal(without_bias, want_experts)
    if case.settings.groups > 1:
        no_groups, _ = route_by_hand(logits, bias, replace(case.settings, groups=1))
        assert not torch.equal(no_groups, want_experts)
    assert_rows_exact(lambda rows: routers.route(logits[rows], bias, case.settings)[1])
    assert_rows_exact(lambda rows: routers.route(logits[rows], bias, case.settings)[0])


def test_router_bias_decides_the_choice_but_not_the_weights() -> None:
    settings = routers.RouterSettings(1, 1, 1, False, 2.0)
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    experts, weights = routers.route(logits, torch.tensor([1.0, 0.0, 0.0]), settings)
    assert experts.tolist() == [[0]]
    assert weights.tolist() == [[1.0]]  # sigmoid(0) * 2


def test_router_prefers_a_group_by_its_two_best() -> None:
    """Group 0 holds the single best expert, group 1 the better pair."""
    settings = routers.RouterSettings(2, 2, 1, True, 1.0)
    logits = torch.tensor([[3.0, -3.0, -3.0, 2.0, 2.5, -3.0]])
    experts, _ = routers.route(logits, torch.zeros(6), settings)
    assert experts.tolist() == [[4, 3]]


@cases(TOP_CASES)
def test_top_log_probs(case: TopCase) -> None:
    logits = 3 * randn(case.depths, case.vocabulary)
    values, ids = tops.top_log_probs(logits, case.k)
    wide = torch.log_softmax(logits.double(), -1)
    want = wide.sort(-1, descending=True)
    kept = min(case.k, case.vocabulary)
    assert values.dtype == torch.float32
    assert torch.equal(ids, want.indices[:, :kept])
    assert float((values.double() - want.values[:, :kept]).abs().max()) < 5e-6
    some = torch.log_softmax(logits[:, : case.vocabulary // 2].double(), -1)
    assert float((some - wide[:, : case.vocabulary // 2]).abs().max()) > 1e-2  # whole vocabulary


def test_top_log_probs_of_no_rows() -> None:
    values, ids = tops.top_log_probs(torch.zeros(0, 9), 4)
    assert values.shape == ids.shape == (0, 4)
