"""The step free of the contract: what our own kernels may do when a row's bits may depend on the
number of rows and on the context.

Three kinds of choices that the contract freezes are taken anew, by time, for one row count and one
context: how K of each dense product is cut (or cuBLAS in its place), the blocks of attention, the
pieces of the experts' first product. They are swapped in while a graph is captured, and only then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kdtree_engine.engine.measure.products import Product
from kdtree_engine.engine.measure.timing import captured, median_ms
from kdtree_engine.kernels import linear
from kdtree_engine.kernels.experts import PackedExperts, expert_mlp
from kdtree_engine.kernels.linear import PackedLinear, Tiles
from kdtree_engine.kernels.mla_attention import launch as attention
from kdtree_engine.kernels.mla_attention.blocks import Zones, zones
from kdtree_engine.kernels.mla_attention.launch import Tiling
from kdtree_engine.kernels.router import Routing
from kdtree_engine.model import Kimi, moe

SEGMENTS = (1, 2, 4, 8, 16)
EXPERT_SEGMENTS = (1, 2, 4, 8)
ATTENTION_BLOCKS = (128, 256, 512, 1024, 2048)
_MOST_WEIGHTS = 12  # of one shape are timed in turns, so that the L2 is cold
_EVERYWHERE = 1 << 30

Shape = tuple[int, int, int]  # rows, columns, depth of a product


@dataclass(frozen=True)
class Choices:
    """What a step does in place of what the contract says; empty: the same.

    dense: K's segments of a product, 0 for cuBLAS. attention: keys of a block. experts: segments.
    """

    dense: dict[Shape, int] = field(default_factory=dict)
    attention: int | None = None
    experts: int | None = None


class Matrices:
    """Weights as cuBLAS reads them, each copied once; a graph that reads them needs them alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PackedLinear, Tensor]] = {}

    def of(self, weight: PackedLinear) -> Tensor:
        """[width, depth]."""
        key = id(weight)  # not used again while the weight is held here
        if key not in self._known:
            whole = pad(weight.matrix(), (0, 0, 0, weight.width - weight.columns))
            self._known[key] = weight, whole.contiguous()
        return self._known[key][1]


@contextmanager
def free_of_contract(choices: Choices, matrices: Matrices) -> Iterator[None]:
    """Operators called inside work by `choices`."""
    with ExitStack() as stack:
        if choices.dense:
            parts = linear._launch_parts
            swap(stack, linear, "_launch_parts", _dense(parts, choices.dense, matrices))
        if choices.attention is not None:
            table = zones(((_EVERYWHERE, choices.attention),))
            swap(stack, attention, "tiling", _attention(attention.tiling, table))
        if choices.experts is not None:
            swap(stack, moe, "expert_mlp", _experts(expert_mlp, choices.experts))
        yield


def swap(stack: ExitStack, module: object, name: str, value: object) -> None:
    """Put `value` in the place of the module's `name` until the stack is closed."""
    stack.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


Parts = Callable[[Tensor, PackedLinear, Tiles], Tensor]


def _dense(parts: Parts, chosen: dict[Shape, int], matrices: Matrices) -> Parts:
    def launch(x: Tensor, weight: PackedLinear, tiles: Tiles) -> Tensor:
        segments = chosen.get((x.shape[0], weight.columns, weight.depth))
        if segments is None:
            return parts(x, weight, tiles)
        if segments == 0:
            return cublas(x, matrices.of(weight))
        cut = cut_in(weight, segments)
        return parts(x, cut, linear.choose_tiles(x.shape[0], cut))

    return launch


def cublas(x: Tensor, matrix: Tensor) -> Tensor:
    """x [R, K] times matrix [N, K], as one part [1, R, N] float32."""
    if x.dtype == torch.float32:
        return torch.mm(x, matrix.T)[None]
    mm: Any = torch.mm  # the stubs of torch 2.13 do not know out_dtype
    product: Tensor = mm(x, matrix.T, out_dtype=torch.float32)
    return product[None]


def cut_in(weight: PackedLinear, segments: int) -> PackedLinear:
    """The same weight with K in at most so many segments, each of an even number of blocks where
    the weight has one, since a program may take two.
    """
    blocks = weight.tiles.shape[1]
    unit = 2 if blocks % 2 == 0 else 1
    return replace(weight, segment=-(-blocks // (segments * unit)) * unit)


def _attention(tiling: Callable[..., Tiling], table: Zones) -> Callable[..., Tiling]:
    def call(*given: Any) -> Tiling:
        return replace(tiling(*given), zones=table)

    return call


def _experts(operator: Callable[..., Any], segments: int) -> Callable[..., Any]:
    def call(x: Tensor, routing: Routing, packed: PackedExperts) -> Any:
        return operator(x, routing, replace(packed, segments=segments))

    return call


def dense_choices(
    found: Sequence[Product], head: object, matrices: Matrices, repeats: int = 5
) -> dict[Shape, int]:
    """The fastest way to compute each product of a step, where it is not the contract's.

    A product is timed with a reader of its parts, as its parts cost their reader time.
    """
    groups: dict[Shape, list[Product]] = {}
    for one in found:
        groups.setdefault((one.rows, one.weight.columns, one.weight.depth), []).append(one)
    chosen: dict[Shape, int] = {}
    for shape, members in groups.items():
        weights = [one.weight for one in members[:_MOST_WEIGHTS]]
        own = weights[0].segments
        ways = [cut_in(weights[0], count).segments for count in SEGMENTS]
        ways += [0] if weights[0].columns == weights[0].width else []
        dtype = torch.float32 if weights[0] is head else torch.bfloat16
        times = {
            way: _time_dense(weights, shape[0], way, dtype, matrices, repeats)
            for way in dict.fromkeys([own, *ways])
        }
        best = min(times, key=lambda way: times[way])
        if best != own:
            chosen[shape] = best
    return chosen


def _time_dense(
    weights: Sequence[PackedLinear],
    rows: int,
    way: int,
    dtype: torch.dtype,
    matrices: Matrices,
    repeats: int,
) -> float:
    """Milliseconds of all `weights`, one after the other."""
    tiles = weights[0].tiles
    x = torch.randn(rows, weights[0].depth, device=tiles.device).to(weights[0].dtype)
    shape = rows, weights[0].columns, weights[0].depth

    def every() -> None:
        for weight in weights:
            linear.add_parts(linear.product(x, weight), weight.columns, dtype)

    with free_of_contract(Choices({shape: way}), matrices):
        return median_ms(captured(every, tiles.device), tiles.device, repeats)


def attention_trials(chosen: Choices, target: Kimi, context: int) -> list[Choices]:
    """`chosen` with one size of attention's blocks everywhere; kernels only."""
    sizes = [size for size in ATTENTION_BLOCKS if 2 * size <= context]
    return [replace(chosen, attention=size) for size in sizes if on_kernels(target)]


def expert_trials(chosen: Choices, target: Kimi, context: int) -> list[Choices]:
    """`chosen` with fewer segments of the experts' first product."""
    own = [layer.mlp.experts for layer in target.layers if isinstance(layer.mlp, moe.PackedMixture)]
    most = own[0].segments if own else 0
    return [replace(chosen, experts=count) for count in EXPERT_SEGMENTS if count < most]


TRIALS = (attention_trials, expert_trials)
"""What is timed as whole steps, one kind after the other, each with the best of those before."""


def on_kernels(target: Kimi) -> bool:
    """Whether there is anything to choose."""
    return isinstance(target.head, PackedLinear)
