"""Operator: INT4 weights of routed experts, packed, and the bf16 values they stand for.

The layout is compressed-tensors' `pack-quantized` with groups of 32 (docs/checkpoints.md).
Matrix products that read the packed form are operators of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.int4 import reference

GROUP = reference.GROUP
"""Neighbouring inputs that share one scale."""

NIBBLES = reference.NIBBLES
"""Values in one int32 word, the lowest nibble first."""


class Int4Tensor(NamedTuple):
    """One packed weight: `packed` int32 [out, in / 8] and `scale` bfloat16 [out, in / 32]."""

    packed: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight it stands for, in elements."""
        return self.packed.shape[0], self.packed.shape[1] * NIBBLES


def pack(q: Tensor) -> Tensor:
    """Whole numbers [out, in] in [-8, 7], any integer dtype, to int32 words [out, in / 8]."""
    assert q.ndim == 2 and not q.is_floating_point(), f"{q.dtype} {list(q.shape)}"
    assert q.shape[1] % NIBBLES == 0, f"{q.shape[1]} inputs do not fill words of {NIBBLES}"
    return reference.pack(q)


def unpack(packed: Tensor) -> Tensor:
    """int32 words [out, in / 8] to int8 values [out, in] in [-8, 7]."""
    assert packed.ndim == 2 and packed.dtype == torch.int32, f"{packed.dtype} {packed.shape}"
    return reference.unpack(packed)


def dequantise(weight: Int4Tensor) -> Tensor:
    """bf16(q x scale), bfloat16 [out, in]: the value that the checkpoint means."""
    packed, scale = weight
    assert packed.ndim == 2 and packed.dtype == torch.int32, f"{packed.dtype} {packed.shape}"
    assert scale.dtype == torch.bfloat16, f"the scale is {scale.dtype}"
    rows, columns = weight.shape
    assert list(scale.shape) == [rows, columns // GROUP], f"{packed.shape} and {scale.shape}"
    return reference.dequantise(packed, scale)


def quantise(weight: Tensor) -> Int4Tensor:
    """Round finite float weights [out, in] to INT4: scale = bf16(max |w| / 7.5) in each group.

    q = clamp(round(w / scale), -8, 7) in float32, ties to even. A weight is off by at most half a
    scale, save that +7.5 scales, the largest a group holds, become 7.
    """
    assert weight.ndim == 2 and weight.is_floating_point(), f"{weight.dtype} {weight.shape}"
    assert weight.shape[1] % GROUP == 0, f"{weight.shape[1]} inputs do not fill groups of {GROUP}"
    return Int4Tensor(*reference.quantise(weight))


__all__ = ["GROUP", "NIBBLES", "Int4Tensor", "dequantise", "pack", "quantise", "unpack"]
