"""Dense weights as kernels read them: tiles that lie in memory in the order of their reading."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 64  # rows and inputs of one stored tile
_WANTED_PROGRAMS = 132  # one an SM of an H200
_SHORTEST_SEGMENT = 4  # blocks of 64 inputs


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A weight [columns, depth] as tiles [row tiles, K blocks, 64, 64], zeros beyond its edges.

    segment: K blocks of one segment of the sum. A function of the weight's shape alone, since the
    order of additions must not depend on the number of rows (docs/exactness.md).
    """

    tiles: Tensor
    columns: int
    depth: int
    segment: int

    def matrix(self) -> Tensor:
        """The weight as a checkpoint stores it, [columns, depth]."""
        whole = self.tiles.transpose(1, 2).reshape(self.width, -1)
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


def pack_linear(weight: Tensor, dtype: torch.dtype, device: torch.device | str) -> PackedLinear:
    """Tiles of a checkpoint's `weight` [out, in]."""
    columns, depth = weight.shape
    whole = pad(weight.to(device=device, dtype=dtype), (0, -depth % TILE, 0, -columns % TILE))
    rows, blocks = whole.shape[0] // TILE, whole.shape[1] // TILE
    tiles = whole.view(rows, TILE, blocks, TILE).transpose(1, 2).contiguous()
    return PackedLinear(tiles, columns, depth, segment_blocks(rows, blocks))


def random_linear(
    columns: int, depth: int, dtype: torch.dtype, device: torch.device, spread: float
) -> PackedLinear:
    """A weight of normal values made in place, for measuring."""
    rows, blocks = -(-columns // TILE), -(-depth // TILE)
    tiles = torch.empty(rows, blocks, TILE, TILE, dtype=dtype, device=device).normal_(0.0, spread)
    return PackedLinear(tiles, columns, depth, segment_blocks(rows, blocks))
