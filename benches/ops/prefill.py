"""What the contract costs a long causal run: products with K in fixed segments against one sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kdtree_engine.kernels import linear
from kdtree_engine.kernels.linear import PackedLinear, Tiles, choose_tiles, random_linear
from ops.base import Variant

BF16 = torch.bfloat16
ROWS = 2048
SHAPES = {"qkv_a": (2112, 7168), "q_b": (1536, 1536), "o": (7168, 1024), "shared": (896, 7168)}
LAUNCHES = (
    Tiles(128, 128, 64, 8, 3, False),
    Tiles(128, 128, 64, 4, 3, False),
    Tiles(128, 64, 64, 4, 4, False),
    Tiles(64, 128, 64, 4, 4, False),
    Tiles(64, 64, 64, 4, 4, False),
)


def variants() -> Iterator[Variant]:
    """Segments as packed, one segment, and cuBLAS, for every launch."""
    device = torch.device("cuda")
    for name, (columns, depth) in SHAPES.items():
        weight = random_linear(columns, depth, BF16, device, 0.02)
        x = torch.randn(ROWS, depth, device=device, dtype=BF16)
        dense = weight.matrix().T.contiguous()
        wanted = x[:256].double() @ dense.double()
        work = 2.0 * ROWS * columns * depth
        moved = 2.0 * (columns * depth + ROWS * depth)

        def check(get: Callable[[], Tensor], wanted: Tensor = wanted) -> Callable[[], str | None]:
            def run() -> str | None:
                got = get()[:256].double()
                error = ((got - wanted).norm() / wanted.norm()).item()
                return None if error < 5e-3 else f"relative error {error:.1e}"

            return run

        whole = replace(weight, segment=weight.tiles.shape[1])
        for kind, one in (("segments", weight), ("one sum", whole)):
            for tiles in dict.fromkeys([choose_tiles(ROWS, one), *LAUNCHES]):
                if tiles.block_n == 128 and one.tiles.shape[0] % 2:
                    continue

                def run(w: PackedLinear = one, t: Tiles = tiles, x: Tensor = x) -> Tensor:
                    return linear.add_parts(linear._launch_parts(x, w, t), w.columns, BF16)

                label = f"prefill {name} {kind} {tuple(tiles)}"
                yield Variant(label, lambda layer, run=run: run(), check(run), 4, moved, work)

        def library(x: Tensor = x, dense: Tensor = dense) -> Tensor:
            return x @ dense

        label = f"prefill {name} cuBLAS"
        yield Variant(label, lambda layer, run=library: run(), check(library), 4, moved, work)
