"""Mixture of experts, K2.6's shapes on one rank of eight: router, up, down, combination.

The layers' experts take 1.2 GB each, so four of them keep the L2 cold. Bytes are the packed weights
and scales of the distinct experts that the rows choose, uniformly, and the shared expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels import router
from kdtree_engine.kernels.experts import (
    ExpertOutputs,
    PackedExperts,
    TiledWeight,
    Tuning,
    _launch_down,
    _launch_up,
    combine_add_norm,
    random_packed_experts,
    split_up,
    tuning,
)
from kdtree_engine.kernels.experts.packing import DOWN_ROWS, UP_ROWS, unpack_expert
from kdtree_engine.kernels.router import RouterSettings, Routing
from kdtree_engine.kernels.router.reference import route
from kdtree_engine.kernels.swiglu.reference import swiglu
from ops.base import Variant

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INNER, TOP_K, SHARED = 384, 7168, 256, 8, 256
SETTINGS = RouterSettings(TOP_K, 1, 1, True, 2.827)
ROWS = (1, 2, 4, 8, 16, 32, 64)
TILE_ROWS = (128, 64)
LAYERS = 4
PARTS = 4  # of the dense product before the router
CUDA = torch.device("cuda")


class Inputs(NamedTuple):
    """One row count's inputs."""

    parts: Tensor
    bias: Tensor
    x: Tensor
    routing: Routing
    distinct: int


def make_inputs(rows: int) -> Inputs:
    """Logits of spread one, the same for a row count at every call."""
    generator = torch.Generator(CUDA).manual_seed(rows)
    columns = EXPERTS + 2 * SHARED
    parts = torch.randn(PARTS, rows, columns, device=CUDA, generator=generator)
    bias = torch.zeros(EXPERTS, device=CUDA)
    x = torch.randn(rows, HIDDEN, device=CUDA, generator=generator).to(BF16)
    routing = router.route_rows(parts, bias, SETTINGS, SHARED)
    return Inputs(parts, bias, x, routing, int(routing.experts.unique().numel()))


def wanted_down(inputs: Inputs, packed: PackedExperts) -> Tensor:
    """d [R k, H] in float64, h rounded to bf16 between."""
    chosen = inputs.routing.experts.flatten()
    out = torch.empty(chosen.numel(), HIDDEN, device=CUDA, dtype=torch.float64)
    for expert in chosen.unique().tolist():
        own = (chosen == expert).nonzero().flatten()
        up = unpack_expert(packed.up, expert, True).double()
        h = swiglu((inputs.x[own // TOP_K].double() @ up.T).float()).bfloat16()
        out[own] = h.double() @ unpack_expert(packed.down, expert, False).double().T
    return out


def retiled(weight: TiledWeight, rows: int) -> TiledWeight:
    """The same weight in tiles of `rows`, which divide the present ones."""
    tiles = weight.weight
    experts, count, blocks, present, words = tiles.shape
    share = present // rows
    tiles = tiles.view(experts, count, blocks, share, rows, words).transpose(2, 3)
    tiles = tiles.reshape(experts, count * share, blocks, rows, words)
    scale = weight.scale
    if scale is not None:
        scale = scale.view(experts, count, -1, share, rows).transpose(2, 3)
        scale = scale.reshape(experts, count * share, -1, rows)
    return replace(weight, weight=tiles, scale=scale)


def all_retiled(packed: PackedExperts, rows: int) -> PackedExperts:
    """`retiled`, every weight."""
    assert packed.shared_down is not None
    return replace(
        packed,
        up=retiled(packed.up, rows),
        down=retiled(packed.down, rows),
        shared_down=retiled(packed.shared_down, rows),
    )


def make_layers() -> dict[int, list[PackedExperts]]:
    """By tile height; both hold the same values."""
    highest, *others = TILE_ROWS
    layers = {
        highest: [
            random_packed_experts(EXPERTS, HIDDEN, INNER, SHARED, CUDA) for _ in range(LAYERS)
        ]
    }
    for rows in others:
        layers[rows] = [all_retiled(packed, rows) for packed in layers[highest]]
    return layers


class Judge:
    """Compares an operator's result with the reference and with the first variant's bits."""

    def __init__(self, wanted: Tensor, most: float = 5e-3) -> None:
        self.wanted = wanted
        self.most = most
        self.first: Tensor | None = None

    def __call__(self, got: Tensor) -> str | None:
        """What is wrong with `got`, if anything."""
        error = ((got.double() - self.wanted).norm() / self.wanted.norm()).item()
        if not error < self.most:
            return f"relative error {error:.1e}"
        if self.first is None:
            self.first = got
        return None if torch.equal(got, self.first) else "other bits than the first variant"


def candidates(tile_rows: int, chosen: Tuning) -> list[Tuning]:
    """The chosen launch first."""
    narrow = tile_rows // 64
    ways = [Tuning(narrow, stages) for stages in (1, 2, 3, 4, 5)] + [Tuning(2 * narrow, 4)]
    return list(dict.fromkeys([chosen, *ways]))


def name_of(part: str, rows: int, tile_rows: int, split: bool, how: Tuning, chosen: bool) -> str:
    kind = "split" if split else "whole"
    best = "chosen " if chosen else ""
    return f"{part} R={rows} {best}[N={tile_rows} {kind} {how.warps} warps {how.stages} stages]"


def up_variants(
    inputs: Inputs, tile_rows: int, layers: list[PackedExperts], judge: Judge
) -> Iterator[Variant]:
    """Checked through down, which adds up and gates the parts of a split."""
    x, routing = inputs.x, inputs.routing
    rows = x.shape[0]
    chosen, is_split = tuning(layers[0].up, 8), split_up(rows * TOP_K, layers[0], CUDA)
    for split, how in product((False, True) if rows <= 8 else (False,),
                              candidates(tile_rows, chosen)):  # fmt: skip

        def run(layer: int, split: bool = split, how: Tuning = how) -> Tensor:
            return _launch_up(x, routing, layers[layer], split, how)

        def check(run: Callable[[int], Tensor] = run, split: bool = split) -> str | None:
            way = tuning(layers[0].down, 8, parts=split)
            return judge(_launch_down(run(0), x, routing, layers[0], way).down_out)

        best = tile_rows == UP_ROWS and how == chosen and split == is_split
        moved = inputs.distinct * 2 * INNER * HIDDEN * 0.5625
        flops = 4.0 * rows * TOP_K * INNER * HIDDEN
        name = name_of("up", rows, tile_rows, split, how, best)
        yield Variant(name, run, check, LAYERS, moved, flops)


def down_variants(
    inputs: Inputs, tile_rows: int, layers: list[PackedExperts], judge: Judge
) -> Iterator[Variant]:
    """From h and from parts, with the shared expert's product in the same launch."""
    x, routing = inputs.x, inputs.routing
    rows = x.shape[0]
    is_split = split_up(rows * TOP_K, layers[0], CUDA)
    for split in (False, True) if rows <= 8 else (False,):
        inner = _launch_up(x, routing, layers[0], split, tuning(layers[0].up, 8))
        chosen = tuning(layers[0].down, 8, parts=split)
        for how in candidates(tile_rows, chosen):
            if split and how.stages > 3:
                continue  # more shared memory than a block may have

            def run(layer: int, how: Tuning = how, inner: Tensor = inner) -> ExpertOutputs:
                return _launch_down(inner, x, routing, layers[layer], how)

            def check(run: Callable[[int], ExpertOutputs] = run) -> str | None:
                return judge(run(0).down_out)

            best = tile_rows == DOWN_ROWS and how == chosen and split == is_split
            moved = inputs.distinct * INNER * HIDDEN * 0.5625 + 2.0 * SHARED * HIDDEN
            flops = 2.0 * rows * HIDDEN * (TOP_K * INNER + SHARED)
            name = name_of("down", rows, tile_rows, split, how, best)
            yield Variant(name, run, check, LAYERS, moved, flops)


def route_variants(inputs: Inputs) -> Iterator[Variant]:
    """Router and grouping: one launch for all rows, or two; several warps."""
    parts, bias = inputs.parts, inputs.bias
    rows, logits = parts.shape[1], parts.sum(0)[:, :EXPERTS]
    wanted = route(logits, bias, SETTINGS)[1].double()
    judge = Judge(wanted, 1e-4)
    ways = [(False, warps) for warps in (1, 2, 4)]
    if rows <= router.FUSED_ROWS:
        ways += [(True, warps) for warps in (1, 4, 8, 16)]
    for fused, warps in ways:

        def run(_: int, fused: bool = fused, warps: int = warps) -> Routing:
            out = router._launch_route(parts, bias, SETTINGS, SHARED, BF16, 8, fused, warps)
            if fused:
                return out
            return out._replace(blocks=router.group_choices(out.experts, EXPERTS, 8))

        def check(run: Callable[[int], Routing] = run) -> str | None:
            return judge(run(0).weights)

        chosen = (fused, warps) == (rows <= router.FUSED_ROWS, router.route_warps(rows))
        launches = "one launch" if fused else "two launches"
        name = f"route R={rows} {'chosen ' if chosen else ''}[{launches} {warps} warps]"
        yield Variant(name, run, check, LAYERS, 4.0 * parts.numel())


def combine_variant(inputs: Inputs) -> Variant:
    """The weighted sum with the residual and the next norm."""
    rows, weights = inputs.x.shape[0], inputs.routing.weights
    down = torch.randn(LAYERS, rows * TOP_K, HIDDEN, device=CUDA).to(BF16)
    shared = torch.randn(LAYERS, rows, HIDDEN, device=CUDA)
    norm = torch.ones(HIDDEN, device=CUDA, dtype=BF16)
    mixed = (down[0].view(rows, TOP_K, -1).double() * weights.double()[..., None]).sum(1)
    judge = Judge(inputs.x.double() + mixed + shared[0].double())

    def run(layer: int) -> tuple[Tensor, Tensor]:
        return combine_add_norm(down[layer], weights, shared[layer], inputs.x, norm, 1e-5)

    moved = rows * HIDDEN * (2.0 * TOP_K + 4 + 2 + 2 + 2)
    return Variant(f"combine R={rows}", run, lambda: judge(run(0)[0]), LAYERS, moved)


def variants() -> Iterator[Variant]:
    """Everything, row count by row count."""
    layers = make_layers()
    for rows in ROWS:
        inputs = make_inputs(rows)
        judge = Judge(wanted_down(inputs, layers[TILE_ROWS[0]][0]))
        yield from route_variants(inputs)
        for tile_rows in TILE_ROWS:
            yield from up_variants(inputs, tile_rows, layers[tile_rows], judge)
            yield from down_variants(inputs, tile_rows, layers[tile_rows], judge)
        yield combine_variant(inputs)
