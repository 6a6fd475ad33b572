"""FP8 weights in PyTorch: any device, written to be read (docs/checkpoints.md).

A weight [out, in] is stored as e4m3 numbers q and one float32 scale for each block of 128 rows by
128 inputs, counted from the weight's first row and input. It stands for q x scale: checkpoints call
the scale `weight_scale_inv`, but it multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def by_element(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [ceil(rows / 128), ceil(columns / 128)] repeated for each weight, [rows, columns]."""
    wide = scales.repeat_interleave(BLOCK, dim=1)[:, :columns]
    return wide.repeat_interleave(BLOCK, dim=0)[:rows]


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """See the operator. The product is rounded to float32, and then to `dtype`."""
    return (values.float() * by_element(scales, *values.shape)).to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """See the operator. weight [out, in], any float dtype, to (values, scales)."""
    rows, columns = weight.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    whole = torch.zeros(down * BLOCK, across * BLOCK, device=weight.device)
    whole[:rows, :columns] = weight.float()
    scales = whole.view(down, BLOCK, across, BLOCK).abs().amax(dim=(1, 3)) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    # Divided in float32 the largest may come out above 448, which e4m3fn would make a NaN.
    q = (weight.float() / by_element(scales, rows, columns)).clamp(-LARGEST, LARGEST)
    return q.to(torch.float8_e4m3fn), scales
