"""x [B, M, K] times w [B, K, N], each row of the result a function of its own row of x alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kdtree_engine.kernels.matmul.probe import MOST_ROWS, row_rule

SEGMENT = 512
"""float32 products longer than this along K are cut into segments, added in order."""
ALIGNMENT = 8
"""K and N are filled up with zeros to multiples of this: a BLAS may round a row that does not begin
at a vector's border by its place in the call.
"""


def row_bmm(x: Tensor, w: Tensor) -> Tensor:
    """Batched product [B, M, N] in the operands' dtype, row-exact on the CPU.

    x [B, M, K] and w [B, K, N] on one device; w may be a transposed view. Elsewhere than on the CPU
    this is `torch.bmm`: there the contract is kept by the kernels of this package.
    """
    if not x.is_cpu:
        return torch.bmm(x, w)
    batch, rows, depth = x.shape
    columns = w.shape[2]
    if batch == 1:  # a batch of one is handed to another BLAS routine
        return row_bmm(x.expand(2, -1, -1), w.expand(2, -1, -1))[:1]
    if depth % ALIGNMENT or columns % ALIGNMENT:
        deeper, wider = -depth % ALIGNMENT, -columns % ALIGNMENT
        return row_bmm(pad(x, (0, deeper)), pad(w, (0, wider, 0, deeper)))[..., :columns]
    if rows > MOST_ROWS:
        return torch.cat([row_bmm(part, w) for part in torch.split(x, MOST_ROWS, dim=1)], 1)
    if depth > SEGMENT and x.dtype == torch.float32:
        return _segments(x, w)
    rule = row_rule((depth, columns, x.dtype, w.stride(2) != 1))
    if rule.block is not None and rows > rule.block:
        return torch.cat([row_bmm(part, w) for part in torch.split(x, rule.block, dim=1)], 1)
    padded = rule.rows(rows)
    if padded == rows:
        return torch.bmm(x, w)
    return torch.bmm(pad(x, (0, 0, 0, padded - rows)), w)[:, :rows]


def _segments(x: Tensor, w: Tensor) -> Tensor:
    total = row_bmm(x[..., :SEGMENT], w[:, :SEGMENT])
    for start in range(SEGMENT, x.shape[2], SEGMENT):
        end = start + SEGMENT
        total = total + row_bmm(x[..., start:end], w[:, start:end])
    return total
