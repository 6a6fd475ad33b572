"""Mixture of experts, K2.6's shapes on one rank of eight: router, up, down, combination.

The layers' experts take 1.2 GB each, so four of them keep the L2 cold. Bytes are the packed weights
and scales of the distinct experts that the rows choose, uniformly, and the shared expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels import router
from kdtree_engine.kernels.experts import (
    NORM_WARPS,
    DownTuning,
    ExpertOutputs,
    PackedExperts,
    UpTuning,
    _launch_down,
    _launch_up,
    combine_add_norm,
    down_tuning,
    random_packed_experts,
    up_tuning,
)
from kdtree_engine.kernels.experts.packing import unpack_expert
from kdtree_engine.kernels.router import RouterSettings, Routing
from kdtree_engine.kernels.router.reference import route
from kdtree_engine.kernels.swiglu.reference import swiglu
from ops.base import Variant

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INNER, TOP_K, SHARED = 384, 7168, 256, 8, 256
SETTINGS = RouterSettings(TOP_K, 1, 1, True, 2.827)
ROWS = (1, 2, 4, 8, 16, 32, 64)
TOKENS = 8  # of a block, at all these row counts
LAYERS = 4
PARTS = 8  # of the dense product before the router
CUDA = torch.device("cuda")


class Model(NamedTuple):
    """A mixture's number of experts, its routing, and how its weights are stored."""

    name: str
    experts: int
    settings: RouterSettings
    planes: int  # as random_packed_experts takes it

    @property
    def bytes_a_weight(self) -> float:
        """With the scales."""
        return 0.5625 if self.planes == 4 else 1.0078125


K26 = Model("", EXPERTS, SETTINGS, 4)


class Inputs(NamedTuple):
    """One row count's inputs."""

    model: Model
    parts: Tensor
    bias: Tensor
    x: Tensor
    routing: Routing
    distinct: int


def make_inputs(rows: int, model: Model = K26) -> Inputs:
    """Logits of spread one, the same for a row count at every call."""
    generator = torch.Generator(CUDA).manual_seed(rows)
    columns = model.experts + 2 * SHARED
    parts = torch.randn(PARTS, rows, columns, device=CUDA, generator=generator)
    bias = torch.zeros(model.experts, device=CUDA)
    x = torch.randn(rows, HIDDEN, device=CUDA, generator=generator).to(BF16)
    routing = router.route_rows(parts, bias, model.settings, SHARED)
    return Inputs(model, parts, bias, x, routing, int(routing.experts.unique().numel()))


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


def up_ways(rows: int, chosen: UpTuning) -> list[UpTuning]:
    """The chosen launch first."""
    if rows <= 8:
        ways = [UpTuning(32, 0, stages, joint=True) for stages in (3, 4, 5)]
        ways += [UpTuning(16, 0, 5, joint=True), UpTuning(64, 0, 3, joint=True)]
        ways += [UpTuning(64, 1, 3), UpTuning(128, 2, 3)]
    else:
        ways = [UpTuning(64, 1, stages) for stages in (3, 4, 5)]
        ways += [UpTuning(128, 2, stages) for stages in (3, 4)]
        ways += [UpTuning(64, 0, 3, joint=True)]
    return list(dict.fromkeys([chosen, *ways]))


def down_ways(rows: int, chosen: DownTuning) -> list[DownTuning]:
    """The chosen launch first."""
    ways = [DownTuning(128, 2, 3), DownTuning(64, 1, 3), DownTuning(128, 2, 3, 4)]
    ways += [DownTuning(64, 1, 2), DownTuning(128, 2, 2, 2)]
    ways = [how._replace(shared_tokens=chosen.shared_tokens) for how in ways]
    ways += [chosen._replace(shared_rows=64)]
    return list(dict.fromkeys([chosen, *ways]))


def up_variants(inputs: Inputs, layers: list[PackedExperts], judge: Judge) -> Iterator[Variant]:
    """Checked through down."""
    x, routing = inputs.x, inputs.routing
    rows = x.shape[0]
    slots = rows * TOP_K
    chosen = up_tuning(layers[0], slots, TOKENS, x)
    moved = inputs.distinct * 2 * INNER * HIDDEN * inputs.model.bytes_a_weight
    flops = 4.0 * rows * TOP_K * INNER * HIDDEN
    for how in up_ways(rows, chosen):

        def run(layer: int, how: UpTuning = how) -> Tensor:
            return _launch_up(x, routing, layers[layer], how)

        def check(run: Callable[[int], Tensor] = run) -> str | None:
            way = down_tuning(layers[0], rows, slots, TOKENS)
            return judge(_launch_down(run(0), x, routing, layers[0], way).down_out)

        kind = "joint" if how.joint else f"whole {how.warps} warps"
        best = "chosen " if how == chosen else ""
        name = f"{inputs.model.name}up R={rows} {best}[{how.rows} rows {kind} {how.stages} stages]"
        yield Variant(name, run, check, LAYERS, moved, flops)


def down_variants(inputs: Inputs, layers: list[PackedExperts], judge: Judge) -> Iterator[Variant]:
    """With the shared expert's product in the same launch."""
    x, routing = inputs.x, inputs.routing
    rows = x.shape[0]
    inner = _launch_up(x, routing, layers[0], up_tuning(layers[0], rows * TOP_K, TOKENS, x))
    chosen = down_tuning(layers[0], rows, rows * TOP_K, TOKENS)
    assert routing.shared is not None and layers[0].shared_down is not None
    weight = unpack_expert(layers[0].shared_down, 0, False).double()
    shared_judge = Judge(routing.shared.double() @ weight.T, 1e-4)
    moved = inputs.distinct * INNER * HIDDEN * inputs.model.bytes_a_weight
    moved += 2.0 * SHARED * HIDDEN
    flops = 2.0 * rows * HIDDEN * (TOP_K * INNER + SHARED)
    for how in down_ways(rows, chosen):

        def run(layer: int, how: DownTuning = how) -> ExpertOutputs:
            return _launch_down(inner, x, routing, layers[layer], how)

        def check(run: Callable[[int], ExpertOutputs] = run) -> str | None:
            out = run(0)
            assert out.shared_out is not None
            return judge(out.down_out) or shared_judge(out.shared_out)

        best = "chosen " if how == chosen else ""
        cut = f"{how.pieces} x {how.rows} rows"
        launch = (
            f"{how.warps} warps {how.stages} stages shared {how.shared_rows} x {how.shared_tokens}"
        )
        name = f"{inputs.model.name}down R={rows} {best}[{cut} {launch}]"
        yield Variant(name, run, check, LAYERS, moved, flops)


def route_variants(inputs: Inputs) -> Iterator[Variant]:
    """Router, and grouping where there is more than one row; several warps a row."""
    parts, bias = inputs.parts, inputs.bias
    rows, logits = parts.shape[1], parts.sum(0)[:, :EXPERTS]
    wanted = route(logits, bias, SETTINGS)[1].double()
    judge = Judge(wanted, 1e-4)
    for warps in (1, 2, 4):

        def run(_: int, warps: int = warps) -> Routing:
            out = router._launch_route(parts, bias, SETTINGS, SHARED, BF16, TOKENS, warps)
            if rows == 1:
                return out
            return out._replace(blocks=router.group_choices(out.experts, EXPERTS, TOKENS))

        def check(run: Callable[[int], Routing] = run) -> str | None:
            return judge(run(0).weights)

        chosen = "chosen " if warps == router.ROUTE_WARPS else ""
        name = f"route R={rows} {chosen}[{warps} warps]"
        yield Variant(name, run, check, LAYERS, 4.0 * parts.numel())


def combine_variants(inputs: Inputs) -> Iterator[Variant]:
    """The weighted sum with the residual and the next norm; the warps change the norm's bits."""
    rows, weights = inputs.x.shape[0], inputs.routing.weights
    down = torch.randn(LAYERS, rows * TOP_K, HIDDEN, device=CUDA).to(BF16)
    shared = torch.randn(LAYERS, rows, HIDDEN, device=CUDA)
    norm = torch.ones(HIDDEN, device=CUDA, dtype=BF16)
    mixed = (down[0].view(rows, TOP_K, -1).double() * weights.double()[..., None]).sum(1)
    judge = Judge(inputs.x.double() + mixed + shared[0].double())
    moved = rows * HIDDEN * (2.0 * TOP_K + 4 + 2 + 2 + 2)
    for warps in (8, 16, 32):

        def run(layer: int, warps: int = warps) -> tuple[Tensor, Tensor]:
            own = down[layer], weights, shared[layer], inputs.x
            return combine_add_norm(*own, norm, 1e-5, warps)

        def check(run: Callable[[int], tuple[Tensor, Tensor]] = run) -> str | None:
            return judge(run(0)[0])

        chosen = "chosen " if warps == NORM_WARPS else ""
        name = f"combine R={rows} {chosen}[{warps} warps]"
        yield Variant(name, run, check, LAYERS, moved)


def variants() -> Iterator[Variant]:
    """Everything, row count by row count."""
    layers = [random_packed_experts(EXPERTS, HIDDEN, INNER, SHARED, CUDA) for _ in range(LAYERS)]
    for rows in ROWS:
        inputs = make_inputs(rows)
        judge = Judge(wanted_down(inputs, layers[0]))
        yield from route_variants(inputs)
        yield from up_variants(inputs, layers, judge)
        yield from down_variants(inputs, layers, judge)
        yield from combine_variants(inputs)
