"""x [B, M, K] times w [B, K, N], each row of the result a function of its own row of x alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kdtree_engine.kernels.matmul.probe import RowRule, row_rule

SEGMENT = 512
"""float32 products longer than this along K are cut into segments that are added in order."""
ALIGNMENT = 8
"""K and N are filled up with zeros to multiples of this: a BLAS may round a row that does not begin
at a vector's border by its place in the call.
"""


def row_bmm(x: Tensor, w: Tensor) -> Tensor:
    """Batched product [B, M, N] in the operands' dtype, row-exact on the CPU.

    x [B, M, K] and w [B, K, N] on one device; w may be a transposed view. Elsewhere than on the CPU
    this is `torch.bmm`: there the contract is kept by the kernels of this package.
    """
    if x.device.type != "cpu":
        return torch.bmm(x, w)
    batch, _, depth = x.shape
    if batch == 1:  # a batch of one is handed to another BLAS routine
        return row_bmm(x.expand(2, -1, -1), w.expand(2, -1, -1))[:1]
    columns = w.shape[2]
    if depth % ALIGNMENT or columns % ALIGNMENT:
        deeper, wider = -depth % ALIGNMENT, -columns % ALIGNMENT
        return row_bmm(pad(x, (0, deeper)), pad(w, (0, wider, 0, deeper)))[..., :columns]
    if depth <= SEGMENT or x.dtype != torch.float32:
        return _segment(x, w)
    total = _segment(x[..., :SEGMENT], w[:, :SEGMENT])
    for start in range(SEGMENT, depth, SEGMENT):
        total = total + _segment(x[..., start : start + SEGMENT], w[:, start : start + SEGMENT])
    return total


def _segment(x: Tensor, w: Tensor) -> Tensor:
    rows = x.shape[1]
    rule = row_rule((w.shape[1], w.shape[2], x.dtype, w.stride(2) != 1))
    if rule.block is not None and rows > rule.block:
        return _blocked(x, w, rule, rule.block)
    missing = rule.rows(rows) - rows
    if missing:
        return torch.bmm(pad(x, (0, 0, 0, missing)), w)[:, :rows]
    return torch.bmm(x, w)


def _blocked(x: Tensor, w: Tensor, rule: RowRule, block: int) -> Tensor:
    parts = []
    for part in torch.split(x, block, dim=1):
        rows = part.shape[1]
        filled = pad(part, (0, 0, 0, rule.rows(rows) - rows))
        parts.append(torch.bmm(filled, w)[:, :rows])
    return torch.cat(parts, dim=1)
