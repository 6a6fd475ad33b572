"""y [R, N] = x [R, K] W, with W kept as column blocks [blocks, K, width]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kdtree_engine.kernels.matmul import ALIGNMENT, row_bmm

BLOCK_WIDTH = 128


@dataclass(frozen=True, eq=False)
class ColumnBlocks:
    """A weight of `columns` output columns as [blocks, K, width], zeros beyond the last column."""

    blocks: Tensor
    columns: int

    def matrix(self) -> Tensor:
        """The weight as a checkpoint stores it, [columns, K]."""
        return self.blocks.transpose(1, 2).reshape(-1, self.blocks.shape[1])[: self.columns]


def pack_columns(weight: Tensor, dtype: torch.dtype, device: torch.device | str) -> ColumnBlocks:
    """Column blocks of a checkpoint's `weight` [out, in]. At least two blocks, equally wide."""
    columns = weight.shape[0]
    count = max(2, -(-columns // BLOCK_WIDTH))
    width = -(-columns // (count * ALIGNMENT)) * ALIGNMENT
    padded = pad(weight.to(device=device, dtype=dtype), (0, 0, 0, count * width - columns))
    blocks = padded.reshape(count, width, -1).transpose(1, 2).contiguous()
    return ColumnBlocks(blocks, columns)


def linear(x: Tensor, weight: ColumnBlocks) -> Tensor:
    """x [R, K] times the weight, [R, columns], in x's dtype; rows do not affect each other."""
    blocks = weight.blocks
    y = row_bmm(x.expand(blocks.shape[0], -1, -1), blocks)
    y = y.transpose(0, 1).reshape(x.shape[0], -1)
    return y if y.shape[1] == weight.columns else y[:, : weight.columns]
