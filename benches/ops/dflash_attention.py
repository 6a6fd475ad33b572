"""Draft blocks of one rank of eight (8 heads, 1 KV head of 128): tiles, splits of the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kdtree_engine.kernels import dflash_attention as code
from kdtree_engine.kernels.dflash_attention.cases import KIMI
from kdtree_engine.kernels.dflash_attention.reference import dflash_attention_paged
from ops.base import Variant

PAGE, LAYERS = 64, 6
HEADS, KV_HEADS = KIMI.heads // 8, KIMI.kv_heads // 8
# requests, context, draft window
SHAPES = ((1, 4096, None), (1, 131_072, 4096), (1, 131_072, None), (8, 32_768, 4096))
TILES = (
    code.Tile(64, 4, 2),
    code.Tile(64, 8, 2),
    code.Tile(64, 8, 3),
    code.Tile(32, 4, 3),
    code.Tile(16, 4, 3),
)


def variants() -> Iterator[Variant]:
    """Every tile with the default number of splits, the default tile with other numbers."""
    for batch, context, window in SHAPES:
        yield from _shape(batch, context, window)


def _shape(batch: int, context: int, window: int | None) -> Iterator[Variant]:
    random = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device="cuda", dtype=torch.bfloat16)

    width = context // PAGE + 1
    layers = [normal(batch * width, PAGE, 2, KV_HEADS, KIMI.head_dim) for _ in range(LAYERS)]
    pages = torch.randperm(batch * width, device="cuda").view(batch, width).int()
    contexts = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    query = normal(batch, KIMI.block, HEADS, KIMI.head_dim)
    keys, values = (normal(batch, KIMI.block, KV_HEADS, KIMI.head_dim) for _ in range(2))
    seen = batch * min(context, window or context) * KV_HEADS
    given = (contexts, pages, window)

    def launch(tile: code.Tile, splits: int | None) -> Callable[[int], Tensor]:
        return lambda layer: code._launch(
            query, keys, values, layers[layer], contexts, pages, (window, None), tile, splits
        )

    def check(run: Callable[[int], Tensor]) -> str | None:
        want = dflash_attention_paged(query, (keys, values), layers[0], *given, None).float()
        worst = float((run(0).float() - want).abs().max() / want.std())
        return None if worst < 0.05 else f"error {worst:.2e} of a standard deviation"

    default = code.choose_tile(KIMI.block * HEADS // KV_HEADS, torch.bfloat16)
    choices: list[tuple[code.Tile, int | None]] = [(tile, None) for tile in TILES]
    choices += [(default, splits) for splits in (16, 33, 66, 132)]
    for tile, splits in choices:
        run = launch(tile, splits)
        yield Variant(
            f"B={batch} context={context} window={window} | rows {tile.rows} warps {tile.warps} "
            f"stages {tile.stages} splits {splits or 'chosen'}",
            run,
            lambda run=run: check(run),  # type: ignore[misc]
            LAYERS,
            bytes=seen * 2 * KIMI.head_dim * 2,
            flops=seen * 2 * 2 * KIMI.head_dim * KIMI.block * HEADS / KV_HEADS,
        )
