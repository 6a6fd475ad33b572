"""Native INT4 as Kimi's checkpoints store it: groups of 32 along the input, symmetric, bf16 scales.

Training and export share these functions, so the exported weights are the very values that the
last third of the training saw.
"""

from __future__ import annotations

import torch

GROUP = 32


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers in [-8, 7] and bf16 scales of a [..., in] weight; a group of zeros gets scale 1."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = torch.clamp(torch.round(groups / scale.float()), -8, 7)
    return q.flatten(-2), scale.squeeze(-1)


def dequantise(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The reference value of a quantised weight: bf16(q * scale)."""
    product = q.float().unflatten(-1, (-1, GROUP)) * scale.float().unsqueeze(-1)
    return product.flatten(-2).to(torch.bfloat16)


def straight_through(weight: torch.Tensor, switch: torch.Tensor) -> torch.Tensor:
    """The weight (switch 0) or its INT4 value (switch 1); the gradient passes as if unchanged.

    The switch is a tensor so that turning quantisation on does not compile the layers again.
    """
    rounded = dequantise(*quantise(weight.detach())).to(weight.dtype)
    return weight + switch * (rounded - weight.detach())


def pack(q: torch.Tensor) -> torch.Tensor:
    """Eight integers to an int32 word along the input, lowest nibble first."""
    nibbles = (q.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8, device=q.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """The integers of packed words."""
    shifts = 4 * torch.arange(8, device=words.device)
    nibbles = (words.to(torch.int64).unsqueeze(-1) >> shifts) & 15
    return (nibbles - 8).flatten(-2)
