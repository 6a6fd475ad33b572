"""Rotary embedding (arXiv 2104.09864) with YaRN's frequencies (arXiv 2309.00071).

The target rotates neighbouring pairs (2i, 2i+1); the drafter rotates halves (i, i + D/2). Angles
are tabulated once in float64 and kept in float32: a bfloat16 table would lose positions at long
context, and a table row has the same bits however many rows a step has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.config import RopeConfig


@dataclass(frozen=True, eq=False)
class RopeTable:
    """cos and sin [positions, D/2], float32, multiplied by the amplitude."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [R, D/2] of the rows' positions [R] int64."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """[dim/2] float64 angles per position: theta^(-2i/dim), stretched where YaRN says so."""
    index = torch.arange(dim // 2, dtype=torch.float64)
    plain = rope.theta ** (-2.0 * index / dim)
    if rope.kind != "yarn":
        return plain

    def correction(rotations: float) -> float:
        wavelengths = rope.original_max_positions / (2.0 * math.pi * rotations)
        return dim * math.log(wavelengths) / (2.0 * math.log(rope.theta))

    low = max(math.floor(correction(rope.beta_fast)), 0)
    high: float = min(math.ceil(correction(rope.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    ramp = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (1.0 - ramp) + plain / rope.factor * ramp


def rope_table(rope: RopeConfig, dim: int, positions: int, device: torch.device) -> RopeTable:
    """The table for positions 0..positions-1."""
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float64), inverse_frequencies(rope, dim)
    )
    cos, sin = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
    return RopeTable(cos.float().to(device), sin.float().to(device))


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i+1) of x [R, ..., D] by cos and sin [R, D/2]; result in x's dtype."""
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (-1,)
    cos, sin = cos.view(shape), sin.view(shape)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of x [R, ..., D] by cos and sin [R, D/2]; result in x's dtype."""
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (-1,)
    cos, sin = cos.view(shape), sin.view(shape)
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)
