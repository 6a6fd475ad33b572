"""The experts' kernels through Triton's interpreter, and the tiles that they read."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kdtree_engine.kernels.experts import (
    DownTuning,
    ExpertOutputs,
    PackedExperts,
    UpTuning,
    _launch_down,
    _launch_up,
    combine_add_norm,
    down_tuning,
    expert_mlp,
    pack_experts,
    random_packed_experts,
    up_tuning,
)
from kdtree_engine.kernels.experts.packing import segments_of, unpack_expert
from kdtree_engine.kernels.int4 import Int4Tensor, dequantise, quantise
from kdtree_engine.kernels.rms_norm import rms_norm
from kdtree_engine.kernels.router import Routing, group_choices
from kdtree_engine.kernels.swiglu import swiglu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted")


class Layer(NamedTuple):
    """Weights as a checkpoint has them (values), and packed."""

    gate_up: Tensor  # [E, 2 I, H] float32
    down: Tensor  # [E, H, I] float32
    shared: Tensor | None  # [H, Is]
    packed: PackedExperts


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_layer(
    experts: int, hidden: int, inner: int, shared: int, quantised: bool = True,
    dtype: torch.dtype = torch.float32, tiles: tuple[int, int] = (32, 64),
) -> Layer:  # fmt: skip
    up = randn(experts, 2 * inner, hidden, seed=1) * hidden**-0.5
    down = randn(experts, hidden, inner, seed=2) * inner**-0.5
    shared_down = randn(hidden, shared, seed=3) * shared**-0.5 if shared else None
    pairs: list[tuple[Int4Tensor | Tensor, Int4Tensor | Tensor]]
    if quantised:
        packed = [(quantise(u), quantise(d)) for u, d in zip(up, down, strict=True)]
        up = torch.stack([dequantise(u) for u, _ in packed]).float()
        down = torch.stack([dequantise(d) for _, d in packed]).float()
        pairs = [*packed]
    else:
        pairs = [*zip(up, down, strict=True)]
        up, down = up.to(dtype).float(), down.to(dtype).float()
    tiled = pack_experts(iter(pairs), experts, shared_down, dtype, "cpu", *tiles)
    return Layer(up, down, shared_down, tiled)


def routing_of(chosen: Tensor, experts: int, shared: int, tokens: int, dtype=torch.float32):
    rows = chosen.shape[0]
    inner = randn(rows, shared, seed=5).to(dtype) if shared else None
    weights = randn(*chosen.shape, seed=6).sigmoid()
    return Routing(chosen, weights, inner, group_choices(chosen, experts, tokens))


def choices(rows: int, experts: int, top_k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, experts, generator=generator).argsort(1)[:, :top_k].int()


def inner_reference(x: Tensor, chosen: Tensor, layer: Layer) -> Tensor:
    rows = [
        swiglu(layer.gate_up[e] @ x[r].float())
        for r, own in enumerate(chosen.tolist())
        for e in own
    ]
    return torch.stack(rows)


def down_reference(h: Tensor, chosen: Tensor, layer: Layer) -> Tensor:
    flat = chosen.flatten().tolist()
    return torch.stack([layer.down[e] @ h[slot].float() for slot, e in enumerate(flat)])


def check(out: ExpertOutputs, x: Tensor, routing: Routing, layer: Layer, bound: float) -> None:
    h = inner_reference(x, routing.experts, layer).to(x.dtype)
    expected = down_reference(h, routing.experts, layer)
    assert (out.down_out.float() - expected).norm() < bound * expected.norm()
    if layer.shared is not None:
        assert routing.shared is not None and out.shared_out is not None
        shared = routing.shared.float() @ layer.shared.to(x.dtype).float().T
        assert (out.shared_out - shared).norm() < bound * shared.norm()


@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (96, 32), (160, 96)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_packing_keeps_every_value(hidden, inner, interleaved) -> None:
    layer = make_layer(3, hidden, inner, 0)
    for expert in range(3):
        tiled = layer.packed.up if interleaved else layer.packed.down
        whole = (layer.gate_up if interleaved else layer.down)[expert]
        assert torch.equal(unpack_expert(tiled, expert, interleaved).float(), whole)
    dense = make_layer(3, hidden, inner, 0, quantised=False)
    assert torch.equal(unpack_expert(dense.packed.up, 1, True), dense.gate_up[1])
    assert torch.equal(unpack_expert(dense.packed.down, 2, False), dense.down[2])


def test_random_experts_have_the_layout_of_packed_ones() -> None:
    made = random_packed_experts(2, 256, 128, 64, "cpu", torch.Generator().manual_seed(0))
    source = [
        (torch.zeros(256, 256), torch.zeros(256, 128)),
        (torch.zeros(256, 256), torch.zeros(256, 128)),
    ]
    pairs = [(quantise(u), quantise(d)) for u, d in source]
    packed = pack_experts(pairs, 2, torch.zeros(256, 64), torch.bfloat16, "cpu")
    for a, b in ((made.up, packed.up), (made.down, packed.down)):
        assert a.weight.shape == b.weight.shape and a.scale is not None and b.scale is not None
        assert a.scale.shape == b.scale.shape and (a.rows, a.columns) == (b.rows, b.columns)
    assert made.shared_down is not None and packed.shared_down is not None
    assert made.shared_down.weight.shape == packed.shared_down.weight.shape
    assert 0 < float(unpack_expert(made.up, 0, True).float().std()) < 0.05


def test_segments_follow_the_width_alone() -> None:
    assert [segments_of(k) for k in (256, 1023, 1024, 2304, 7168)] == [1, 1, 2, 4, 4]


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("hidden", "inner", "shared"), [(256, 128, 32), (160, 96, 48), (96, 40, 0)]
)
def test_products_are_the_references(quantised, hidden, inner, shared) -> None:
    if quantised and inner % 32:
        inner = 32
    layer = make_layer(6, hidden, inner, shared, quantised)
    routing = routing_of(choices(5, 6, 3), 6, shared, 8)
    x = randn(5, hidden, seed=4)
    check(expert_mlp(x, routing, layer.packed), x, routing, layer, 1e-6)


def test_half_precision_activations() -> None:
    layer = make_layer(4, 128, 64, 32, dtype=torch.float16)
    routing = routing_of(choices(3, 4, 2), 4, 32, 8, torch.float16)
    x = randn(3, 128, seed=4).half()
    check(expert_mlp(x, routing, layer.packed), x, routing, layer, 2e-3)


@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_experts_with_more_slots_than_a_block(tokens) -> None:
    layer = make_layer(4, 128, 32, 32)
    chosen = torch.tensor([[2, 0]], dtype=torch.int32).repeat(tokens + 3, 1)
    routing = routing_of(chosen, 4, 32, tokens)
    x = randn(tokens + 3, 128, seed=4)
    check(expert_mlp(x, routing, layer.packed), x, routing, layer, 1e-6)


@pytest.mark.parametrize(
    ("segments", "quantised"), [(2, True), (8, True), (1, False), (4, False), (8, False)]
)
def test_every_cut_of_the_products_gives_the_same_bits(segments, quantised) -> None:
    # 7 blocks of inputs (28 where dense): the last segment is shorter than the others, or missing.
    layer = make_layer(3, 896, 32, 32, quantised, tiles=(64, 128))
    packed = replace(layer.packed, segments=segments)
    routing = routing_of(choices(2, 3, 1), 3, 32, 8)
    x = randn(2, 896, seed=4)
    first = _launch_up(x, routing, packed, UpTuning(64, 1, 2))
    for rows, joint in ((64, True), (16, False), (16, True)):
        h = _launch_up(x, routing, packed, UpTuning(rows, 1, 2, joint))
        assert torch.equal(h, first), (rows, joint)
    other = _launch_up(x, routing, replace(packed, segments=3 - min(2, segments)),
                       UpTuning(64, 1, 2))  # fmt: skip
    assert not torch.equal(other, first)  # the segments do matter
    whole = _launch_down(first, x, routing, packed, DownTuning(128, 1, 2))
    check(whole, x, routing, layer, 1e-6)
    assert whole.shared_out is not None
    for cut in ((64, 1, 2, 3, 128, 8), (32, 1, 2, 16, 64, 8)):
        how = DownTuning(*cut)
        out = _launch_down(first, x, routing, packed, how)
        assert torch.equal(out.down_out, whole.down_out), how
        assert out.shared_out is not None and torch.equal(out.shared_out, whole.shared_out), how


def test_a_rows_bits_do_not_depend_on_the_rows() -> None:
    layer = make_layer(8, 128, 32, 32)
    packed = replace(layer.packed, segments=1)
    chosen, x = choices(64, 8, 2), randn(64, 128, seed=4)
    whole = routing_of(chosen, 8, 32, 8)

    def run(x: Tensor, routing: Routing) -> ExpertOutputs:
        """`expert_mlp`, but for the shared expert's tokens: NumPy's bits depend on their number."""
        slots = routing.experts.numel()
        inner = _launch_up(x, routing, packed, up_tuning(packed, slots, 8, x))
        how = down_tuning(packed, len(x), slots, 8)._replace(shared_tokens=8)
        return _launch_down(inner, x, routing, packed, how)

    expected = run(x, whole)
    assert whole.shared is not None and expected.shared_out is not None
    for first, last in ((0, 1), (5, 8), (17, 25)):
        own = chosen[first:last].contiguous()
        blocks = group_choices(own, 8, 8)
        some = Routing(own, whole.weights[first:last], whole.shared[first:last], blocks)
        out = run(x[first:last], some)
        assert torch.equal(out.down_out, expected.down_out[2 * first : 2 * last])
        assert out.shared_out is not None
        assert torch.equal(out.shared_out, expected.shared_out[first:last])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_combination_adds_in_order_and_norms_the_rounded_sum(shared, dtype) -> None:
    rows, top_k, hidden = 3, 3, 96
    down = randn(rows * top_k, hidden, seed=1).to(dtype)
    weights = randn(rows, top_k, seed=2).sigmoid()
    shared_out = randn(rows, hidden, seed=3) if shared else None
    residual, norm = randn(rows, hidden, seed=4).to(dtype), randn(hidden, seed=5).to(dtype)
    x_new, normed = combine_add_norm(down, weights, shared_out, residual, norm, 1e-5)
    y = torch.zeros(rows, hidden, dtype=torch.float64)
    for i in range(top_k):
        y = (y + weights[:, i, None].double() * down.view(rows, top_k, -1)[:, i].double()).float()
        y = y.double()  # each step rounds once, as an fma does; the interpreter's rounds twice
    total = y.float() if shared_out is None else y.float() + shared_out
    bound = 1e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(x_new, (residual.float() + total).to(dtype), rtol=bound, atol=1e-6)
    expected = rms_norm(x_new, norm, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=bound, atol=1e-6)
    one = combine_add_norm(
        down[top_k : 2 * top_k], weights[1:2], None if shared_out is None else shared_out[1:2],
        residual[1:2], norm, 1e-5,
    )  # fmt: skip
    assert torch.equal(one[0][0], x_new[1]) and torch.equal(one[1][0], normed[1])
