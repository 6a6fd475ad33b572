"""FP8 weights on the device: the bits of the same kernels over the weight in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels import linear
from kdtree_engine.kernels.experts import (
    DownTuning,
    PackedExperts,
    UpTuning,
    _launch_down,
    _launch_up,
    down_tuning,
    expert_mlp,
    pack_experts,
    up_tuning,
)
from kdtree_engine.kernels.experts.packing import unpack_expert
from kdtree_engine.kernels.fp8 import Fp8Tensor, blocks_of
from kdtree_engine.kernels.linear import PackedLinear, Tiles, pack_linear
from kdtree_engine.kernels.router import Routing, group_choices
from kdtree_engine.kernels.swiglu.reference import swiglu

pytestmark = pytest.mark.gpu

CUDA = "cuda"
BF16 = torch.bfloat16
ROWS = (1, 8, 64, 300)
EXPERTS, TOP_K = 16, 4


def uneven(rows: int, columns: int) -> Fp8Tensor:
    """Every block with another scale; values of all sizes, denormals among them."""
    spread = torch.rand(rows, 1, device=CUDA) * 60
    values = (torch.randn(rows, columns, device=CUDA) * spread).to(torch.float8_e4m3fn)
    scales = torch.rand(blocks_of(rows, columns), device=CUDA)
    return Fp8Tensor(values, (0.001 + scales * 0.01) * (rows + columns) ** -0.5)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(BF16)


def near(got: Tensor, wanted: Tensor, most: float) -> None:
    error = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
    assert error < most, error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ptx", [True, False])
def test_every_value_is_multiplied_and_rounded_once(dtype: torch.dtype, ptx: bool) -> None:
    """One input is 1 and the others 0, so a product is a weight: all bytes but NaN."""
    held = torch.arange(256, dtype=torch.uint8, device=CUDA).view(2, 128)[:, :127]
    values = held.contiguous().view(torch.float8_e4m3fn)
    x = torch.eye(127, device=CUDA).to(dtype)
    for scale in (1.0, 0.0123456, 1e-30, 1e30 if dtype != torch.float16 else 100.0):
        weight = Fp8Tensor(values, torch.full((1, 1), scale, device=CUDA))
        packed = pack_linear(weight, dtype, CUDA)
        parts = linear._launch_parts(x, packed, Tiles(64, 8, 64, 4, 3, True, ptx))
        got = linear.add_parts(parts, 2, torch.float32)
        assert torch.equal(got.T, weight.dequantize(dtype).float()), scale


@pytest.mark.parametrize("ptx", [True, False])
def test_a_nan_stays_one(ptx: bool) -> None:
    held = torch.zeros(3, 128, dtype=torch.uint8, device=CUDA)
    held[0, 3], held[2, 100] = 0x7F, 0xFF
    weight = Fp8Tensor(held.view(torch.float8_e4m3fn), torch.ones(1, 1, device=CUDA))
    tiles = Tiles(64, 8, 64, 4, 3, True, ptx)
    parts = linear._launch_parts(normal(2, 128), pack_linear(weight, BF16, CUDA), tiles)
    got = linear.add_parts(parts, 3, torch.float32)
    assert got[:, 0].isnan().all() and got[:, 2].isnan().all() and (got[:, 1] == 0).all()


def run(x: Tensor, packed: PackedLinear, tiles: Tiles | None = None) -> Tensor:
    if tiles is None:
        return linear.linear(x, packed, torch.float32)
    parts = linear._launch_parts(x, packed, tiles)
    return linear.add_parts(parts, packed.columns, torch.float32)


@pytest.mark.parametrize(
    ("parts", "depth"), [((1536, 576), 7168), ((1536,), 1536), ((130,), 200), ((64, 192), 512)]
)
def test_products(parts: tuple[int, ...], depth: int) -> None:
    weights = [uneven(rows, depth) for rows in parts]
    packed = pack_linear(weights, BF16, CUDA)
    matrix = torch.cat([weight.dequantize(BF16) for weight in weights])
    dense = pack_linear(matrix, BF16, CUDA)
    assert packed.scales is not None and torch.equal(packed.matrix(), matrix)
    x = normal(ROWS[-1], depth)
    wanted = run(x, dense)
    near(wanted, x.double() @ matrix.double().T, 1e-5)
    for rows in (*ROWS, 16, 65, 257):
        assert torch.equal(run(x[:rows], packed), wanted[:rows]), rows
    for tiles in (
        Tiles(64, 8, 64, 1, 3, True), Tiles(64, 8, 64, 4, 6, True, False),
        Tiles(64, 16, 64, 2, 3, False), Tiles(64, 64, 64, 4, 3, True),
        Tiles(64, 64, 64, 8, 3, False), Tiles(64, 128, 64, 4, 3, False, False),
    ):  # fmt: skip
        assert torch.equal(run(x, packed, tiles), wanted), tiles
    if packed.tiles.shape[1] % 2 == 0:
        for tiles in (Tiles(64, 8, 128, 4, 3, True), Tiles(64, 64, 128, 4, 3, True)):
            assert torch.equal(run(x, packed, tiles), wanted), tiles
    if packed.tiles.shape[0] % 2 == 0:
        for tiles in (Tiles(128, 16, 64, 4, 3, True), Tiles(128, 64, 64, 8, 3, False)):
            assert torch.equal(run(x, packed, tiles), wanted), tiles


def routing_of(chosen: Tensor, shared: Tensor | None, tokens: int = 8) -> Routing:
    weights = torch.rand(chosen.shape, device=CUDA)
    return Routing(chosen, weights, shared, group_choices(chosen, EXPERTS, tokens))


@pytest.fixture(scope="module")
def layers() -> tuple[PackedExperts, PackedExperts]:
    """The same experts as FP8 and dense, four segments of the same borders."""
    hidden, inner = 2304, 256
    pairs = [(uneven(2 * inner, hidden), uneven(hidden, inner)) for _ in range(EXPERTS)]
    values = [(up.dequantize(BF16), down.dequantize(BF16)) for up, down in pairs]
    shared = normal(hidden, 256)
    return tuple(pack_experts(iter(each), EXPERTS, shared, BF16, CUDA) for each in (pairs, values))


def test_experts(layers: tuple[PackedExperts, PackedExperts]) -> None:
    quantised, dense = layers
    assert quantised.segments == dense.segments == 4
    for expert in (0, EXPERTS - 1):
        up, down = (
            unpack_expert(w, expert, w is quantised.up) for w in (quantised.up, quantised.down)
        )
        assert torch.equal(up, unpack_expert(dense.up, expert, True))
        assert torch.equal(down, unpack_expert(dense.down, expert, False))
    x, inner = normal(ROWS[-1], quantised.hidden) * 30, normal(ROWS[-1], 256)
    chosen = torch.rand(ROWS[-1], EXPERTS, device=CUDA).argsort(1)[:, :TOP_K].int().contiguous()
    for tokens in (8, 16, 32, 64):
        wanted = expert_mlp(x, routing_of(chosen, inner, tokens), dense)
        for rows in ROWS:
            some = routing_of(chosen[:rows].contiguous(), inner[:rows], tokens)
            got = expert_mlp(x[:rows], some, quantised)
            assert torch.equal(got.down_out, wanted.down_out[: rows * TOP_K]), (tokens, rows)
            assert got.shared_out is not None and wanted.shared_out is not None
            assert torch.equal(got.shared_out, wanted.shared_out[:rows]), (tokens, rows)
    slots = chosen[:5].flatten().tolist()
    for slot, expert in enumerate(slots):
        up = unpack_expert(dense.up, expert, True).double()
        h = swiglu((up @ x[slot // TOP_K].double()).float()).to(BF16)
        near(wanted.down_out[slot], unpack_expert(dense.down, expert, False).double() @ h.double(),
             5e-3)  # fmt: skip


def test_launches_of_experts_agree_to_the_bit(
    layers: tuple[PackedExperts, PackedExperts],
) -> None:
    """Segments side by side or in turn, by PTX or plainly, blocks of 8 to 64 slots, any tiles."""
    quantised, dense = layers
    x, inner = normal(70, quantised.hidden) * 30, normal(70, 256)
    chosen = torch.rand(70, EXPERTS, device=CUDA).argsort(1)[:, :TOP_K].int().contiguous()
    first = expert_mlp(x, routing_of(chosen, inner), dense)
    ways = [
        (8, UpTuning(16, 0, 4, joint=True), DownTuning(128, 2, 2, 3, 16, 8, 3)),
        (8, UpTuning(32, 0, 3, joint=True, ptx=False), DownTuning(64, 1, 3, 8, 64, 32, 2)),
        (8, UpTuning(64, 0, 2, joint=True), DownTuning(32, 1, 1, 5, 128, 16, 1)),
        (8, UpTuning(128, 2, 3), DownTuning(128, 4, 4, 2, ptx=False)),
        (16, UpTuning(32, 0, 3, joint=True), DownTuning(128, 2, 3, 1)),
    ]
    ways += [
        (tokens, up_tuning(quantised, 10**6, tokens, x), down_tuning(quantised, 70, 10**6, tokens))
        for tokens in (8, 16, 32, 64)
    ]
    for tokens, up, down in ways:
        routing = routing_of(chosen, inner, tokens)
        out = _launch_down(_launch_up(x, routing, quantised, up), x, routing, quantised, down)
        assert torch.equal(out.down_out, first.down_out), (tokens, up, down)
