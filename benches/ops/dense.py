"""Dense products and the row operators between them, K2.6's shapes on one rank of eight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kdtree_engine.kernels import absorb, linear, value_up
from kdtree_engine.kernels.add_norm import add_norm
from kdtree_engine.kernels.latent_rows import write_latents
from kdtree_engine.kernels.linear import (
    PackedLinear,
    Tiles,
    choose_tiles,
    pack_linear,
    random_linear,
)
from kdtree_engine.kernels.rope import Angles
from ops.base import Variant

BF16 = torch.bfloat16
SHAPES = {  # name: (columns, depth)
    "qkv_a": (2112, 7168),
    "q_b": (1536, 1536),
    "o": (7168, 1024),
    "gate+shared": (896, 7168),
    "head": (20480, 7168),
}
ROWS = (1, 8, 16, 32, 64)
LAYERS = 12  # 22 MB and more of weights each: the L2 stays cold
EPS = 1e-5


def candidates(rows: int, weight: PackedLinear) -> list[Tiles]:
    """Launches worth timing at this many rows."""
    narrow = max(8, 1 << (rows - 1).bit_length())
    if weight.scales is not None:
        deep = [(64, 4), (64, 8)]
        if weight.tiles.shape[1] % 2 == 0:
            deep += [(128, 3), (128, 4), (128, 6)]
        return [Tiles(64, narrow, k, warps, n, True) for k, n in deep for warps in (1, 2, 4)]
    wide = [(64, 4), (64, 2), (64, 1)] + ([(128, 4)] if weight.tiles.shape[0] % 2 == 0 else [])
    deep = [(64, 6)] + ([(128, 4)] if weight.tiles.shape[1] % 2 == 0 else [])
    found = [
        Tiles(block_n, narrow, block_k, warps, stages, True)
        for block_n, warps in wide
        for block_k, stages in deep
    ]
    if rows >= 32:
        found += [tiles._replace(block_t=16) for tiles in found[:4]]
    return found


def product_variants(
    name: str, columns: int, depth: int, rows: int, quantised: bool = False
) -> Iterator[Variant]:
    """Every candidate launch of one product, each the same bits as the first; of FP8 weights the
    bits of the product with the weight in bfloat16.
    """
    device = torch.device("cuda")
    count = 4 if name == "head" else LAYERS
    weights = [random_linear(columns, depth, BF16, device, 0.02, quantised) for _ in range(count)]
    x = torch.randn(rows, depth, device=device, dtype=BF16)
    chosen = choose_tiles(rows, weights[0])
    matrix = weights[0].matrix()
    wanted = x.double() @ matrix.double().T
    first: list[Tensor] = []
    if quantised:
        first.append(linear.linear(x, pack_linear(matrix, BF16, device), torch.float32))

    def check(tiles: Tiles) -> Callable[[], str | None]:
        def run() -> str | None:
            parts = linear._launch_parts(x, weights[0], tiles)
            total = linear.add_parts(parts, columns, torch.float32)
            error = ((total.double() - wanted).norm() / wanted.norm()).item()
            first.append(total)
            if error > 1e-4:
                return f"relative error {error:.1e}"
            return None if torch.equal(total, first[0]) else "other bits than the first variant"

        return run

    moved = columns * depth * (1 if quantised else 2)
    for tiles in dict.fromkeys([chosen, *candidates(rows, weights[0])]):
        yield Variant(
            f"{name} R={rows} {'chosen ' if tiles == chosen else ''}{tuple(tiles)}",
            lambda layer, tiles=tiles: linear._launch_parts(x, weights[layer], tiles),
            check(tiles),
            count,
            moved,
            2.0 * rows * columns * depth,
        )


def segment_variants(name: str, columns: int, depth: int, rows: int) -> Iterator[Variant]:
    """The same product with K cut otherwise: what the constant in packed.py is chosen by."""
    device = torch.device("cuda")
    weights = [random_linear(columns, depth, BF16, device, 0.02) for _ in range(LAYERS)]
    x = torch.randn(rows, depth, device=device, dtype=BF16)
    blocks = weights[0].tiles.shape[1]
    for segments in (1, 2, 4, 7, 8, 14, 16):
        if blocks % (2 * segments):
            continue
        cut = [replace(weight, segment=blocks // segments) for weight in weights]
        tiles = choose_tiles(rows, cut[0])
        yield Variant(
            f"{name} R={rows} S={segments} {tuple(tiles)}",
            lambda layer, cut=cut, tiles=tiles: linear._launch_parts(x, cut[layer], tiles),
            lambda cut=cut, tiles=tiles: fine(linear._launch_parts(x, cut[0], tiles)),
            LAYERS,
            columns * depth * 2,
            2.0 * rows * columns * depth,
        )


def fine(value: Tensor) -> str | None:
    """None if everything was written."""
    return None if bool(torch.isfinite(value).all()) else "values that are not finite"


def row_variants(rows: int) -> Iterator[Variant]:
    """The operators between the products."""
    device = torch.device("cuda")

    def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    down = normal(4, rows, 2112, dtype=torch.float32)
    query = normal(4, rows, 1536, dtype=torch.float32)
    out = normal(1, rows, 7168, dtype=torch.float32)
    residual, weight = normal(rows, 7168), normal(7168)
    q_norm, c_norm = normal(1536), normal(512)
    angles = Angles(*(normal(rows, 1, 64, dtype=torch.float32) for _ in range(2)))
    slots = torch.arange(rows, device=device)
    latents = normal(4, 64, 576)
    key_up = [normal(8, 512, 128).transpose(1, 2) for _ in range(LAYERS)]
    value = [normal(8, 128, 512).transpose(1, 2) for _ in range(LAYERS)]
    mixed = normal(rows, 8, 512)
    yield Variant(
        f"add_norm R={rows}",
        lambda layer: add_norm(out, residual, weight, EPS),
        lambda: fine(add_norm(out, residual, weight, EPS)[1]),
        LAYERS,
        rows * 7168 * (8 + 6),
    )
    yield Variant(
        f"latent_rows R={rows}",
        lambda layer: write_latents(down, q_norm, c_norm, EPS, angles, slots, latents, 1536),
        lambda: fine(write_latents(down, q_norm, c_norm, EPS, angles, slots, latents, 1536)),
        LAYERS,
        rows * 2112 * 20,
    )
    for tiles in ((64, 4), (64, 2), (32, 2), (128, 4)):
        yield Variant(
            f"absorb R={rows} {tiles}",
            lambda layer, tiles=tiles: absorb._launch(query, key_up[layer], angles, tiles),
            lambda tiles=tiles: fine(absorb._launch(query, key_up[0], angles, tiles)),
            LAYERS,
            8 * 512 * 128 * 2,
        )
    for tiles in ((32, 256, 2), (32, 512, 2), (16, 512, 1), (64, 256, 4), (64, 128, 4)):
        yield Variant(
            f"value_up R={rows} {tiles}",
            lambda layer, tiles=tiles: value_up._launch(mixed, value[layer], tiles),
            lambda tiles=tiles: fine(value_up._launch(mixed, value[0], tiles)),
            LAYERS,
            8 * 512 * 128 * 2,
        )


def variants() -> Iterator[Variant]:
    """Everything, rows outermost."""
    for rows in ROWS:
        for name, (columns, depth) in SHAPES.items():
            yield from product_variants(name, columns, depth, rows)
            if rows in (1, 16, 64) and name != "head":
                yield from segment_variants(name, columns, depth, rows)
        yield from row_variants(rows)
