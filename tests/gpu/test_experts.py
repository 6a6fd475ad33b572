"""Router and experts on the device: near the reference, and the same bits however they are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels import router
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
from kdtree_engine.kernels.experts.packing import unpack_expert
from kdtree_engine.kernels.int4 import dequantise, quantise
from kdtree_engine.kernels.rms_norm import reference as norm_reference
from kdtree_engine.kernels.router import RouterSettings, Routing, group_choices
from kdtree_engine.kernels.router.blocks import group_by_sort
from kdtree_engine.kernels.router.reference import route
from kdtree_engine.kernels.swiglu.reference import swiglu

pytestmark = pytest.mark.gpu

CUDA = "cuda"
ROWS = 300
EXPERTS, HIDDEN, INNER, TOP_K, SHARED = 24, 2304, 256, 4, 256


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).bfloat16()


def near(got: Tensor, wanted: Tensor, most: float) -> None:
    error = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
    assert error < most, error


@pytest.fixture(scope="module")
def packed() -> PackedExperts:
    """Four segments of 18 blocks of inputs: the last is shorter than the others."""
    made = random_packed_experts(EXPERTS, HIDDEN, INNER, SHARED, CUDA)
    assert made.segments == 4
    return made


def random_choices(rows: int, experts: int = EXPERTS, top_k: int = TOP_K) -> Tensor:
    return torch.rand(rows, experts, device=CUDA).argsort(1)[:, :top_k].int().contiguous()


def with_blocks(routing: Routing, experts: int, tokens: int) -> Routing:
    return routing._replace(blocks=group_choices(routing.experts, experts, tokens))


def random_routing(chosen: Tensor, shared: int = SHARED) -> Routing:
    rows = chosen.shape[0]
    weights = torch.rand(chosen.shape, device=CUDA)
    inner = normal(rows, shared) if shared else None
    return Routing(chosen, weights, inner, group_choices(chosen, EXPERTS, 8))


def rows_of(routing: Routing, first: int, last: int, tokens: int) -> Routing:
    chosen = routing.experts[first:last].contiguous()
    shared = None if routing.shared is None else routing.shared[first:last].contiguous()
    blocks = group_choices(chosen, EXPERTS, tokens)
    return Routing(chosen, routing.weights[first:last], shared, blocks)


def reference(x: Tensor, routing: Routing, packed: PackedExperts) -> Tensor:
    """[R k, H] in float64, h rounded to x's dtype."""
    out = torch.empty(routing.experts.numel(), packed.hidden, device=CUDA, dtype=torch.float64)
    flat = routing.experts.flatten()
    rows = torch.arange(flat.numel(), device=CUDA) // routing.experts.shape[1]
    for expert in flat.unique().tolist():
        own = (flat == expert).nonzero().flatten()
        up = unpack_expert(packed.up, expert, True).double()
        h = swiglu((x[rows[own]].double() @ up.T).float()).to(x.dtype)
        out[own] = h.double() @ unpack_expert(packed.down, expert, False).double().T
    return out


def check(out: ExpertOutputs, x: Tensor, routing: Routing, packed: PackedExperts) -> None:
    near(out.down_out, reference(x, routing, packed), 5e-3)
    if packed.shared_down is not None:
        assert out.shared_out is not None and routing.shared is not None
        weight = unpack_expert(packed.shared_down, 0, False)
        near(out.shared_out, routing.shared.double() @ weight.double().T, 1e-5)


def test_tiles_hold_the_checkpoints_values() -> None:
    pairs = [(quantise(normal(192, 160).float()), quantise(normal(160, 96).float())) for _ in "ab"]
    made = pack_experts(iter(pairs), 2, None, torch.bfloat16, CUDA)
    for index, (up, down) in enumerate(pairs):
        assert torch.equal(unpack_expert(made.up, index, True), dequantise(up))
        assert torch.equal(unpack_expert(made.down, index, False), dequantise(down))


def test_rows_have_the_same_bits_in_any_company(packed: PackedExperts) -> None:
    x, routing = normal(ROWS, HIDDEN), random_routing(random_choices(ROWS))
    whole = expert_mlp(x, routing, packed)
    check(whole, x, routing, packed)
    assert whole.shared_out is not None
    for first, last in ((7, 8), (0, 3), (20, 28), (100, 164)):
        out = expert_mlp(x[first:last], rows_of(routing, first, last, 8), packed)
        assert torch.equal(out.down_out, whole.down_out[first * TOP_K : last * TOP_K])
        assert out.shared_out is not None
        assert torch.equal(out.shared_out, whole.shared_out[first:last])


def test_launches_agree_to_the_bit(packed: PackedExperts) -> None:
    """Segments side by side or in turn, by PTX or plainly, blocks of 8 to 64 slots, any tiles."""
    x, routing = normal(70, HIDDEN), random_routing(random_choices(70))
    first = expert_mlp(x, routing, packed)
    ways = [
        (8, UpTuning(16, 0, 4, joint=True), DownTuning(128, 2, 2, 3, 16, 8, 3)),
        (8, UpTuning(32, 0, 3, joint=True, ptx=False), DownTuning(64, 1, 3, 8, 64, 32, 2)),
        (8, UpTuning(64, 0, 2, joint=True), DownTuning(32, 1, 1, 5, 128, 16, 1)),
        (8, UpTuning(128, 2, 3), DownTuning(128, 4, 4, 2, ptx=False)),
        (16, UpTuning(32, 0, 3, joint=True), DownTuning(128, 2, 3, 1)),
    ]
    ways += [
        (tokens, up_tuning(packed, 10**6, tokens, x), down_tuning(packed, 70, 10**6, tokens))
        for tokens in (8, 16, 32, 64)
    ]
    for tokens, up, down in ways:
        grouped = with_blocks(routing, EXPERTS, tokens)
        inner = _launch_up(x, grouped, packed, up)
        out = _launch_down(inner, x, grouped, packed, down)
        assert torch.equal(out.down_out, first.down_out), (tokens, up, down)
        assert out.shared_out is not None and first.shared_out is not None
        assert torch.equal(out.shared_out, first.shared_out), (tokens, up, down)
    other = replace(packed, segments=1)
    assert not torch.equal(expert_mlp(x, routing, other).down_out, first.down_out)


def test_all_rows_to_the_same_experts(packed: PackedExperts) -> None:
    x, routing = normal(40, HIDDEN), random_routing(random_choices(1).repeat(40, 1))
    check(expert_mlp(x, routing, packed), x, routing, packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("quantised", [True, False], ids=["int4", "dense"])
def test_odd_sizes_and_dense_experts(quantised: bool, dtype: torch.dtype) -> None:
    hidden, inner, shared = 288, 96, 48
    pairs = []
    for _ in range(EXPERTS):
        weights = normal(2 * inner, hidden, scale=0.06), normal(hidden, inner, scale=0.1)
        pairs.append(tuple(map(quantise, weights)) if quantised else weights)
    made = pack_experts(iter(pairs), EXPERTS, normal(hidden, shared), dtype, CUDA)
    routing = random_routing(random_choices(17), shared)
    assert routing.shared is not None
    routing = routing._replace(shared=routing.shared.to(dtype))
    x = normal(17, hidden).to(dtype)
    check(expert_mlp(x, routing, made), x, routing, made)


@pytest.mark.parametrize(
    ("experts", "settings"),
    [
        (384, RouterSettings(8, 1, 1, True, 2.827)),
        (256, RouterSettings(8, 8, 4, True, 2.5)),
        (8, RouterSettings(2, 4, 2, False, 1.0)),
    ],
)
def test_routing(experts: int, settings: RouterSettings) -> None:
    parts = torch.randn(4, ROWS, experts + 2 * SHARED, device=CUDA)
    bias = torch.randn(experts, device=CUDA) - 1.5
    whole = router.route_rows(parts, bias, settings, SHARED)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    wanted, weights = route(total[:, :experts].contiguous(), bias, settings)
    # Scores may differ in the last bit, and then two all but equal experts change places.
    same = (whole.experts == wanted).all(1)
    assert same.float().mean() > 0.99
    near(whole.weights[same], weights[same], 1e-6)
    assert whole.shared is not None
    near(whole.shared, swiglu(total[:, experts:]), 3e-3)
    for first, last in ((0, 1), (5, 8), (10, 18), (100, 164)):
        out = router.route_rows(parts[:, first:last].contiguous(), bias, settings, SHARED)
        assert torch.equal(out.experts, whole.experts[first:last])
        assert torch.equal(out.weights, whole.weights[first:last])
        assert out.shared is not None and torch.equal(out.shared, whole.shared[first:last])
        if last - first > 1:
            tokens = out.blocks.slots.shape[1]
            same_blocks(out, group_by_sort(out.experts, experts, tokens))


def same_blocks(routing: Routing, wanted: router.Blocks) -> None:
    assert torch.equal(routing.blocks.expert, wanted.expert)
    used = wanted.expert >= 0
    assert torch.equal(routing.blocks.slots[used], wanted.slots[used])


def test_equal_scores_go_to_the_smaller_index() -> None:
    parts = torch.zeros(1, 9, 384, device=CUDA)
    settings = RouterSettings(8, 1, 1, True, 1.0)
    for rows in (1, 8, 9):
        out = router.route_rows(parts[:, :rows].contiguous(), torch.zeros(384, device=CUDA),
                                settings, 0)  # fmt: skip
        assert torch.equal(out.experts, torch.arange(8, device=CUDA).int().expand(rows, 8))


def test_combination() -> None:
    hidden, top_k = 7168, 8
    down, weights = normal(ROWS * top_k, hidden), torch.rand(ROWS, top_k, device=CUDA)
    shared, residual = torch.randn(ROWS, hidden, device=CUDA), normal(ROWS, hidden)
    norm = normal(hidden)
    x_new, normed = combine_add_norm(down, weights, shared, residual, norm, 1e-5)
    mixed = (down.view(ROWS, top_k, -1).double() * weights[..., None].double()).sum(1)
    near(x_new, residual.double() + mixed + shared.double(), 3e-3)
    near(normed, norm_reference.rms_norm(x_new, norm, 1e-5), 1e-3)
    for first, last in ((0, 1), (100, 164)):
        out = combine_add_norm(down[first * top_k : last * top_k], weights[first:last],
                               shared[first:last], residual[first:last], norm, 1e-5)  # fmt: skip
        assert torch.equal(out[0], x_new[first:last]) and torch.equal(out[1], normed[first:last])


@pytest.mark.parametrize("rows", [1, 5, 64, 200])
def test_a_graph_replays_new_rows_and_choices(packed: PackedExperts, rows: int) -> None:
    """The whole chain in a graph; its blocks are those of the replay's own choices."""
    settings, bias = RouterSettings(TOP_K, 1, 1, True, 2.0), torch.zeros(EXPERTS, device=CUDA)
    parts = torch.randn(2, rows, EXPERTS + 2 * SHARED, device=CUDA)
    x, residual, norm = normal(rows, HIDDEN), normal(rows, HIDDEN), normal(HIDDEN)

    def step() -> tuple[Tensor, Tensor]:
        routing = router.route_rows(parts, bias, settings, SHARED)
        out = expert_mlp(x, routing, packed)
        return combine_add_norm(out.down_out, routing.weights, out.shared_out, residual, norm, 1e-5)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        parts.copy_(torch.randn_like(parts))
        x.copy_(normal(rows, HIDDEN))
        graph.replay()
        eager = step()
        assert torch.equal(captured[0], eager[0]) and torch.equal(captured[1], eager[1])
        assert torch.isfinite(eager[0]).all()
