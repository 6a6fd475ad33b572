"""Products that read FP8 weights, through Triton's interpreter: the same as of dense weights.

The interpreter's products round as NumPy's do, by shape: where the shapes of the products differ,
bits are compared on whole numbers, whose sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from checkpoint_tools import CheckpointMaker
from torch import Tensor

pytest.importorskip("triton")

from kdtree_engine.checkpoints import ModelCheckpoint, open_model
from kdtree_engine.checkpoints.load import ExpertTensors
from kdtree_engine.checkpoints.names import PROJECTIONS
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.kernels import linear
from kdtree_engine.kernels.experts import (
    DownTuning,
    ExpertOutputs,
    PackedExperts,
    UpTuning,
    _launch_down,
    _launch_up,
    expert_mlp,
    pack_experts,
    random_packed_experts,
)
from kdtree_engine.kernels.experts.packing import unpack_expert
from kdtree_engine.kernels.fp8 import Fp8Tensor, blocks_of, quantize
from kdtree_engine.kernels.fp8.words import (
    RANDOM_SPREAD,
    joined,
    random_words,
    values_of,
    words_of,
)
from kdtree_engine.kernels.linear import (
    PackedLinear,
    Tiles,
    Weight,
    pack_linear,
    pack_weight,
    random_linear,
)
from kdtree_engine.kernels.router import Routing, group_choices
from kdtree_engine.model import load_target
from kdtree_engine.model.moe import PackedMixture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted")

CPU = torch.device("cpu")
NARROW = Tiles(64, 8, 64, 4, 1, True)


def randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def uneven(rows: int, columns: int, seed: int = 0) -> Fp8Tensor:
    """Every block with another scale, so that a scale read at a wrong place shows."""
    values = randn(rows, columns, seed=seed, scale=40.0).to(torch.float8_e4m3fn)
    scales = torch.rand(blocks_of(rows, columns), generator=torch.Generator().manual_seed(seed))
    return Fp8Tensor(values, 0.001 + 0.01 * scales)


def whole(rows: int, columns: int, seed: int = 0) -> Fp8Tensor:
    """Whole numbers, the scales powers of two."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, (rows, columns), generator=generator).float()
    exponents = torch.randint(0, 4, blocks_of(rows, columns), generator=generator)
    return Fp8Tensor(values.to(torch.float8_e4m3fn), 2.0**exponents)


def every_byte() -> Tensor:
    """All bytes but the two NaN, as [2, 127]: positive and negative."""
    return torch.tensor([[*range(127)], [*range(128, 255)]], dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )


def test_words_keep_every_byte_in_its_place() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    words = words_of(values)
    assert words.shape == (2, 64) and words.dtype == torch.int16
    assert torch.equal(values_of(words).view(torch.uint8), values.view(torch.uint8))
    first = words.int() & 0xFFFF
    assert first[0, 3].item() == 3 | (35 << 8) and first[1, 33].item() == 193 | (225 << 8)


def test_random_words_hold_no_nan_and_have_the_spread_that_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    values = values_of(random_words((64, 64), CPU, generator)).float()
    assert values.isfinite().all()
    assert values.std().item() == pytest.approx(RANDOM_SPREAD, rel=0.05)
    assert abs(values.mean().item()) < 0.1 * RANDOM_SPREAD
    # Of 1024 scales, whose squares spread by 0.54 of their mean: 1.7% of it for the mean of all.
    for quantised in (True, False):
        made = random_linear(2048, 2048, torch.bfloat16, CPU, 0.02, quantised, generator)
        assert made.matrix().float().std().item() == pytest.approx(0.02, rel=0.03)
    layer = random_packed_experts(1, 512, 512, 64, CPU, generator, planes=2)
    for weight, up in ((layer.up, True), (layer.down, False)):
        assert unpack_expert(weight, 0, up).float().std().item() == pytest.approx(0.027, rel=0.04)


@pytest.mark.parametrize("scale", [1.0, 0.0123456, 3e-38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_value_is_multiplied_and_rounded_once(scale: float, dtype: torch.dtype) -> None:
    """One input is 1 and the others 0, so a product is a weight."""
    weight = Fp8Tensor(every_byte(), torch.full((1, 1), scale))
    packed = pack_linear(weight, dtype, CPU)
    got = linear.add_parts(linear._launch_parts(torch.eye(127).to(dtype), packed, NARROW), 2, dtype)
    assert torch.equal(got.T, weight.dequantize(dtype))


def test_a_nan_stays_one() -> None:
    values = torch.zeros(3, 64, dtype=torch.uint8)
    values[0, 3], values[2, 40] = 0x7F, 0xFF
    weight = Fp8Tensor(values.view(torch.float8_e4m3fn), torch.ones(1, 1))
    packed = pack_linear(weight, torch.float32, CPU)
    got = linear.linear(torch.ones(2, 64), packed)
    assert got[:, 0].isnan().all() and got[:, 2].isnan().all() and (got[:, 1] == 0).all()
    pair = quantize(torch.ones(64, 64)), weight_of_rows(64, 32)
    pair[0].values.view(torch.uint8)[5, 7] = 0x7F
    layer = pack_experts([pair], 1, None, torch.float32, CPU, 32, 32)
    routing = routing_of(torch.zeros(1, 1, dtype=torch.int32), 1)
    h = _launch_up(torch.ones(1, 64), routing, layer, UpTuning(32, 1, 1))
    assert h.isnan().nonzero().tolist() == [[0, 5]]


def weight_of_rows(rows: int, columns: int) -> Fp8Tensor:
    return quantize(randn(rows, columns, seed=3))


@pytest.mark.parametrize(
    "rows", [[130], [192], [64, 130], [192, 64, 20], [320, 576]], ids=lambda rows: str(rows)
)
def test_parts_keep_their_own_blocks(rows: list[int]) -> None:
    parts = [uneven(count, 300, seed) for seed, count in enumerate(rows)]
    packed = pack_linear(parts, torch.float32, CPU)
    assert packed.scales is not None and packed.tiles.dtype == torch.int16
    dense = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(packed.matrix(), dense)
    assert packed.segment == pack_linear(dense, torch.float32, CPU).segment
    kept = pack_weight(parts, torch.float32, CPU, kernels=False)
    assert torch.equal(kept.matrix(), dense)


@pytest.mark.parametrize(
    "parts",
    [[uneven(65, 128), uneven(64, 128)], [uneven(128, 128), torch.ones(8, 128)]],
    ids=["a border inside a tile", "one dense"],
)
def test_parts_without_one_scale_a_tile_become_dense(parts: list[Weight]) -> None:
    packed = pack_linear(parts, torch.bfloat16, CPU)
    assert packed.scales is None
    first = parts[0]
    assert isinstance(first, Fp8Tensor)
    own = first.dequantize(torch.bfloat16)
    assert torch.equal(packed.matrix()[: len(own)], own)


def run_linear(x: Tensor, packed: PackedLinear, tiles: Tiles) -> Tensor:
    parts = linear._launch_parts(x, packed, tiles)
    return linear.add_parts(parts, packed.columns, torch.float32)


@pytest.mark.parametrize(("columns", "depth"), [(130, 256), (70, 300), (128, 640)])
def test_linear_is_that_of_the_dense_weight(columns: int, depth: int) -> None:
    weight = whole(columns, depth)
    packed = pack_linear(weight, torch.float32, CPU)
    dense = pack_linear(weight.dequantize(torch.float32), torch.float32, CPU)
    x = torch.randint(-4, 5, (9, depth), generator=torch.Generator().manual_seed(1)).float()
    wanted = linear._launch_parts(x, dense, NARROW)
    ways = [NARROW, NARROW._replace(block_t=16), NARROW._replace(split=False)]
    if packed.tiles.shape[1] % 2 == 0:
        ways.append(NARROW._replace(block_k=128))
    if packed.tiles.shape[0] % 2 == 0:
        ways.append(NARROW._replace(block_n=128))
    for tiles in ways:
        got = linear._launch_parts(x, packed, tiles)
        if got.shape == wanted.shape:
            assert torch.equal(got, wanted), tiles
        total = linear.add_parts(got, columns, torch.float32)
        assert torch.equal(total, linear.add_parts(wanted, columns, torch.float32)), tiles
    assert torch.equal(linear._launch_parts(x[3:4], packed, NARROW)[:, 0], wanted[:, 3])
    x = randn(9, depth, seed=2)
    uneven_weight = uneven(columns, depth)
    close = run_linear(x, pack_linear(uneven_weight, torch.float32, CPU), NARROW)
    exact = x.double() @ uneven_weight.dequantize(torch.float32).double().T
    assert (close - exact).norm() < 1e-6 * exact.norm()


class InFp8(ModelCheckpoint):
    """A dense checkpoint whose linear modules, routed experts among them, were made FP8."""

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        found = super().tensor(name, rows, columns)
        return quantize(found) if name.endswith("_proj.weight") or "_mqa." in name else found  # type: ignore[return-value]

    def experts(self, layer: int) -> ExpertTensors:
        return ExpertsInFp8(self, layer)


class ExpertsInFp8(ExpertTensors):
    def weight(self, expert: int, projection: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self._fp8(expert, projection).dequantize(dtype)

    def pairs(  # type: ignore[override]
        self, dtype: torch.dtype = torch.bfloat16
    ) -> Iterator[tuple[Fp8Tensor, Fp8Tensor]]:
        for expert in range(self.count):
            gate, up, down = (self._fp8(expert, name) for name in PROJECTIONS)
            yield joined(gate, up), down

    def _fp8(self, expert: int, projection: str) -> Fp8Tensor:
        return self._checkpoint.tensor(f"{self._module(expert, projection)}.weight")  # type: ignore[return-value]


def test_a_target_keeps_fp8_weights_for_kernels(checkpoint: CheckpointMaker) -> None:
    folder = checkpoint("deepseek-v3", dims=Dims(q_lora_rank=64, moe_intermediate_size=128))
    opened = open_model(folder)
    source = InFp8(folder, opened.config, opened._files)
    target = load_target(source, torch.bfloat16, CPU, kernels=True)
    dense = load_target(source, torch.bfloat16, CPU, kernels=False)
    for own, other in zip(target.layers, dense.layers, strict=True):
        for name in ("query_and_latent", "query_up", "output"):
            weight, wanted = getattr(own.attention, name), getattr(other.attention, name)
            assert weight.scales is not None and torch.equal(weight.matrix(), wanted.matrix())
        assert torch.equal(own.attention.key_up, other.attention.key_up)
        if isinstance(own.mlp, PackedMixture):
            experts = other.mlp.experts
            for index in (0, opened.config.num_experts - 1):
                up = unpack_expert(own.mlp.experts.up, index, True)
                down = unpack_expert(own.mlp.experts.down, index, False)
                assert own.mlp.experts.up.planes == own.mlp.experts.down.planes == 2
                assert torch.equal(up, experts.gate_up[index].T)
                assert torch.equal(down, experts.down[index].T)
            assert own.mlp.gate.scales is None
    assert isinstance(target.layers[-1].mlp, PackedMixture)


def test_joined_weights_keep_their_blocks() -> None:
    first, second = uneven(128, 200, 1), uneven(70, 200, 2)
    values = [part.dequantize(torch.float32) for part in (first, second)]
    assert torch.equal(joined(first, second).dequantize(torch.float32), torch.cat(values))
    with pytest.raises(AssertionError, match="70 rows above"):
        joined(second, first)


def test_two_tiles_of_one_program_have_scales_of_their_own() -> None:
    """The first part has one tile, so the second's blocks begin in the middle of a program."""
    parts = [whole(64, 128, 1), whole(192, 128, 2)]
    parts[0] = Fp8Tensor(parts[0].values, torch.full((1, 1), 8.0))
    parts[1] = Fp8Tensor(parts[1].values, torch.tensor([[1.0], [4.0]]))
    x = torch.randint(-4, 5, (3, 128), generator=torch.Generator().manual_seed(1)).float()
    got = run_linear(x, pack_linear(parts, torch.float32, CPU), NARROW._replace(block_n=128))
    assert torch.equal(got, x @ torch.cat([part.dequantize(torch.float32) for part in parts]).T)


def routing_of(chosen: Tensor, experts: int, tokens: int = 8) -> Routing:
    weights = torch.ones(chosen.shape)
    return Routing(chosen, weights, None, group_choices(chosen, experts, tokens))


def layers(
    experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32
) -> tuple[PackedExperts, PackedExperts]:
    """The same experts as FP8 and dense."""
    pairs = [
        (uneven(2 * inner, hidden, seed), uneven(hidden, inner, seed + 100))
        for seed in range(experts)
    ]
    values = [(up.dequantize(dtype), down.dequantize(dtype)) for up, down in pairs]
    quantised = pack_experts(iter(pairs), experts, None, dtype, CPU, 64, 64)
    return quantised, pack_experts(iter(values), experts, None, dtype, CPU, 64, 64)


@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (96, 40), (300, 136), (1024, 8)])
def test_expert_tiles_hold_the_checkpoints_values(hidden: int, inner: int) -> None:
    quantised, dense = layers(3, hidden, inner)
    assert quantised.segments == dense.segments and quantised.up.planes == 2
    for expert in range(3):
        for one, other, up in (
            (quantised.up, dense.up, True), (quantised.down, dense.down, False)
        ):  # fmt: skip
            got = unpack_expert(one, expert, up, torch.float32)
            assert torch.equal(got, unpack_expert(other, expert, up))


def random_choices(rows: int, experts: int, top_k: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(rows, experts, generator=generator).argsort(1)[:, :top_k].int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 128), (96, 40)])
def test_experts_are_those_of_the_dense_weights(
    hidden: int, inner: int, dtype: torch.dtype
) -> None:
    quantised, dense = layers(5, hidden, inner, dtype)
    routing = routing_of(random_choices(7, 5, 2), 5)
    x = randn(7, hidden, seed=4).to(dtype)
    got, wanted = (expert_mlp(x, routing, layer) for layer in (quantised, dense))
    assert got.down_out.isfinite().all() and torch.equal(got.down_out, wanted.down_out)


@pytest.mark.parametrize(("hidden", "segments"), [(512, 4), (448, 4), (448, 8)])
def test_every_cut_of_the_experts_products_gives_the_same_bits(hidden: int, segments: int) -> None:
    """Of 7 blocks of 64 inputs the last of 4 segments has fewer, and the last of 8 none."""
    pair = replace_segments(layers(2, hidden, 32), segments)
    routing = routing_of(torch.tensor([[1], [0]], dtype=torch.int32), 2)
    x = randn(2, hidden, seed=4)
    first = _launch_up(x, routing, pair[0], UpTuning(64, 1, 2))
    for rows, joint in ((64, True), (16, False)):
        h = _launch_up(x, routing, pair[0], UpTuning(rows, 1, 2, joint))
        assert torch.equal(h, first), (rows, joint)
    if hidden == 512:  # the dense weight's segments have the same borders
        assert torch.equal(first, _launch_up(x, routing, pair[1], UpTuning(64, 1, 2)))
    wanted = _launch_down(first, x, routing, pair[1], DownTuning(64, 1, 2))
    for cut in ((64, 1, 2, 3), (32, 1, 2)):
        out = _launch_down(first, x, routing, pair[0], DownTuning(*cut))
        assert torch.equal(out.down_out, wanted.down_out), cut


def replace_segments(
    pair: tuple[PackedExperts, PackedExperts], segments: int
) -> tuple[PackedExperts, PackedExperts]:
    return replace(pair[0], segments=segments), replace(pair[1], segments=segments)


def test_a_rows_bits_do_not_depend_on_the_rows() -> None:
    layer, _ = layers(4, 256, 32)
    chosen, x = random_choices(20, 4, 2), randn(20, 256, seed=4)

    def run(first: int, last: int) -> ExpertOutputs:
        return expert_mlp(x[first:last], routing_of(chosen[first:last].contiguous(), 4), layer)

    expected = run(0, 20)
    for first, last in ((0, 1), (5, 8), (11, 19)):
        assert torch.equal(run(first, last).down_out, expected.down_out[2 * first : 2 * last])


def test_an_fp8_shared_expert_is_made_dense() -> None:
    pair, shared = (uneven(64, 96), uneven(96, 32)), uneven(96, 48)
    layer = pack_experts([pair], 1, shared, torch.float32, CPU, 32, 32)
    assert layer.shared_down is not None and layer.shared_down.scale is None
    got = unpack_expert(layer.shared_down, 0, False)
    assert torch.equal(got, shared.dequantize(torch.float32))


def test_experts_of_different_kinds_are_a_bug() -> None:
    fp8 = uneven(64, 96), uneven(96, 32)
    dense = torch.zeros(64, 96), torch.zeros(96, 32)
    for pairs in ([fp8, dense], [dense, fp8]):
        with pytest.raises(AssertionError, match="different kinds"):
            pack_experts(pairs, 2, None, torch.float32, CPU, 32, 32)
