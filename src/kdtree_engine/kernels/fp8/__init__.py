"""Operator: FP8 weights in blocks of 128 by 128, and the values they stand for.

The layout is DeepSeek-V3's (docs/checkpoints.md). Matrix products that read the FP8 form are
operators of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.fp8 import reference

BLOCK = reference.BLOCK
"""Neighbouring rows, and neighbouring inputs, that share one scale."""


class Fp8Tensor(NamedTuple):
    """One weight in blocks: `values` float8_e4m3fn [out, in] and `scales` float32
    [ceil(out / 128), ceil(in / 128)]. The last blocks may be partial.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight it stands for, in elements."""
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """values x scales, [out, in], multiplied in float32 and rounded to `dtype`."""
        values, scales = self
        assert values.ndim == 2 and values.dtype == torch.float8_e4m3fn, f"{values.dtype}"
        assert scales.dtype == torch.float32, f"the scales are {scales.dtype}"
        assert tuple(scales.shape) == blocks_of(*self.shape), f"{values.shape} and {scales.shape}"
        return reference.dequantize(values, scales, dtype)


def blocks_of(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a weight [rows, columns]."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantize(weight: Tensor) -> Fp8Tensor:
    """Round finite float weights [out, in] to e4m3, each block's largest to 448, its largest value.

    A block of zeros gets the scale 1.
    """
    assert weight.ndim == 2 and weight.is_floating_point(), f"{weight.dtype} {weight.shape}"
    return Fp8Tensor(*reference.quantize(weight))


__all__ = ["BLOCK", "Fp8Tensor", "blocks_of", "quantize"]
