"""INT4 weights in PyTorch: any device, written to be read (docs/checkpoints.md).

A weight [out, in] is stored as whole numbers q in [-8, 7], eight to an int32 word along the input,
the lowest nibble first, each as the unsigned value q + 8; every 32 inputs share one bf16 scale.
What a checkpoint means by it is bf16(q x scale): q x scale needs up to 11 bits, so the rounding to
bf16 is real and part of the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
NIBBLES = 8


def pack(q: Tensor) -> Tensor:
    """See the operator. q [out, in], any integer dtype, to int32 [out, in / 8]."""
    rows, columns = q.shape
    nibbles = (q.to(torch.int64) + 8).reshape(rows, columns // NIBBLES, NIBBLES)
    shifts = torch.arange(0, 4 * NIBBLES, 4, device=q.device)
    # Summed in 64 bits; a top nibble of 8 or more then makes the 32-bit word negative.
    words = (nibbles << shifts).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(packed: Tensor) -> Tensor:
    """See the operator. packed int32 [out, in / 8] to int8 [out, in]."""
    shifts = torch.arange(0, 4 * NIBBLES, 4, device=packed.device, dtype=torch.int32)
    # Shifting a negative word drags its sign in; the mask afterwards drops it again.
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return (nibbles - 8).to(torch.int8).flatten(start_dim=-2)


def dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    """See the operator. The product is exact in float32 and rounded once."""
    q = unpack(packed)
    groups = q.reshape(*scale.shape, GROUP).float()
    values: Tensor = (groups * scale.float().unsqueeze(-1)).to(torch.bfloat16)
    return values.flatten(start_dim=-2)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """See the operator. weight [out, in], any float dtype, to (packed, scale)."""
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(dim=-1) / 7.5).to(torch.bfloat16)
    # A group of zeros gets some scale other than zero, as compressed-tensors does it.
    scale = torch.where(scale == 0, torch.finfo(torch.bfloat16).eps, scale)
    q = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    return pack(q.to(torch.int8).flatten(start_dim=-2)), scale
