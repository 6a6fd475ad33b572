"""Dense weights as kernels read them: tiles that lie in memory in the order of their reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kdtree_engine.kernels.fp8 import BLOCK, Fp8Tensor
from kdtree_engine.kernels.fp8.words import (
    dense,
    on_device,
    random_scales,
    random_words,
    values_of,
    words_of,
)

Weight = Tensor | Fp8Tensor
"""[out, in], as a checkpoint stores it."""

Parts = Weight | Sequence[Weight]
"""One weight, or several of one input, whose rows follow each other."""

TILE = 64  # rows and inputs of one stored tile
_WANTED_PROGRAMS = 132  # one an SM of an H200
_SHORTEST_SEGMENT = 4  # blocks of 64 inputs


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A weight [columns, depth] as tiles [row tiles, K blocks, 64, 64], zeros beyond its edges.

    segment: K blocks of one segment of the sum. A function of the weight's shape alone, since the
    order of additions must not depend on the number of rows (docs/exactness.md). dtype: of the
    activations. FP8 has `scales` [row tiles, K blocks] float32, and tiles of `words_of`
    [row tiles, K blocks, 64, 32] int16; a weight is value * scale, rounded once to `dtype`.
    """

    tiles: Tensor
    columns: int
    depth: int
    segment: int
    dtype: torch.dtype
    scales: Tensor | None = None

    def matrix(self) -> Tensor:
        """The weight [columns, depth] in `dtype`."""
        tiles = self.tiles
        if self.scales is not None:
            tiles = values_of(tiles).float() * self.scales[:, :, None, None]
            tiles = tiles.to(self.dtype)
        whole = tiles.transpose(1, 2).reshape(self.width, -1)
        return whole[: self.columns, : self.depth]

    @property
    def segments(self) -> int:
        """Segments that K is cut into, the last one perhaps shorter."""
        return -(-self.tiles.shape[1] // self.segment)

    @property
    def width(self) -> int:
        """Columns with the zeros that fill the last row tile."""
        return self.tiles.shape[0] * TILE


def segment_blocks(row_tiles: int, blocks: int) -> int:
    """K blocks a segment: segments are a power of two, as many as give every SM a program.

    More of them would still speed up one row, by less than reading their sums costs 64 rows and a
    prompt (docs/exactness.md). Even where the number of blocks is, since a program may take two.
    """
    most = max(1, min(_WANTED_PROGRAMS // row_tiles, blocks // _SHORTEST_SEGMENT))
    segments = 1 << (most.bit_length() - 1)
    unit = 2 if blocks % 2 == 0 else 1
    return -(-blocks // (segments * unit)) * unit


def whole_weight(parts: Parts, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """The dense weight [out, in] of all parts."""
    each = [dense(part, dtype, device) for part in _listed(parts)]
    return each[0] if len(each) == 1 else torch.cat(each)


def pack_linear(parts: Parts, dtype: torch.dtype, device: torch.device | str) -> PackedLinear:
    """Tiles of a checkpoint's weight [out, in], or of several, one below the other.

    They stay in FP8 where all of them are and where a tile has one scale: every part but the last
    has a multiple of 64 rows. Otherwise those in FP8 are made dense. Blocks of scales count from
    the first row of their own part.
    """
    parts = _listed(parts)
    if not _stays_fp8(parts):
        whole = whole_weight(parts, dtype, device)
        columns, depth = whole.shape
        tiles = _tiles(whole)
        segment = segment_blocks(*tiles.shape[:2])
        return PackedLinear(tiles, columns, depth, segment, dtype)
    own = [on_device(part, device) for part in parts if isinstance(part, Fp8Tensor)]
    values = torch.cat([part.values.view(torch.uint8) for part in own])
    columns, depth = values.shape
    tiles = words_of(_tiles(values))
    scales = torch.cat([_tile_scales(part) for part in own])
    return PackedLinear(tiles, columns, depth, segment_blocks(*scales.shape), dtype, scales)


def packed_linear_bytes(rows: Sequence[int], depth: int, dtype: torch.dtype, fp8: bool) -> int:
    """What `pack_linear` takes for parts of so many rows, all of them FP8 or none."""
    tiles = -(-sum(rows) // TILE) * -(-depth // TILE)
    if fp8 and _whole_tiles(rows):
        return tiles * (TILE * TILE + torch.float32.itemsize)
    return tiles * TILE * TILE * dtype.itemsize


def random_linear(
    columns: int,
    depth: int,
    dtype: torch.dtype,
    device: torch.device,
    spread: float,
    quantised: bool = False,
    generator: torch.Generator | None = None,
) -> PackedLinear:
    """A weight of random values made in place, for measuring: normal ones, or FP8.

    spread: their standard deviation. generator: the device's.
    """
    rows, blocks = -(-columns // TILE), -(-depth // TILE)
    segment = segment_blocks(rows, blocks)
    if quantised:
        tiles = random_words((rows, blocks, TILE, TILE // 2), device, generator)
        scales = random_scales((rows, blocks), spread, device, generator)
        return PackedLinear(tiles, columns, depth, segment, dtype, scales)
    tiles = torch.empty(rows, blocks, TILE, TILE, dtype=dtype, device=device)
    tiles.normal_(0.0, spread, generator=generator)
    return PackedLinear(tiles, columns, depth, segment, dtype)


def _listed(parts: Parts) -> list[Weight]:
    return [parts] if isinstance(parts, Tensor | Fp8Tensor) else list(parts)


def _stays_fp8(parts: list[Weight]) -> bool:
    whole = _whole_tiles([part.shape[0] for part in parts])
    return whole and all(isinstance(part, Fp8Tensor) for part in parts)


def _whole_tiles(rows: Sequence[int]) -> bool:
    """Whether no tile holds rows of two parts."""
    return all(count % TILE == 0 for count in rows[:-1])


def _tiles(whole: Tensor) -> Tensor:
    """[row tiles, K blocks, 64, 64] of [out, in]."""
    columns, depth = whole.shape
    whole = pad(whole, (0, -depth % TILE, 0, -columns % TILE))
    rows, blocks = whole.shape[0] // TILE, whole.shape[1] // TILE
    return whole.view(rows, TILE, blocks, TILE).transpose(1, 2).contiguous()


def _tile_scales(part: Fp8Tensor) -> Tensor:
    """[row tiles, K blocks]: of the block that each tile lies in."""
    rows, blocks = (-(-size // TILE) for size in part.shape)
    each = BLOCK // TILE
    by_row = part.scales.repeat_interleave(each, 0)[:rows]
    return by_row.repeat_interleave(each, 1)[:, :blocks].contiguous()
