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
class Angles:
    """cos and signed sin [R, D] float32 of R rows, multiplied by the amplitude.

    One value a dimension: a dimension's partner in its pair is multiplied by `sin`, whose sign is
    negative for the first of a pair, so a rotation is x cos + swapped(x) sin.
    """

    cos: Tensor
    sin: Tensor

    def over_heads(self) -> Angles:
        """The same, [R, 1, D], for x [R, heads, D]."""
        return Angles(self.cos.unsqueeze(1), self.sin.unsqueeze(1))


@dataclass(frozen=True, eq=False)
class RopeTable:
    """cos and signed sin [positions, D] float32, in one of the two layouts."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> Angles:
        """Angles of the rows' positions [R] int64."""
        return Angles(self.cos.index_select(0, positions), self.sin.index_select(0, positions))


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


def rope_table(
    rope: RopeConfig, dim: int, positions: int, device: torch.device, *, interleaved: bool
) -> RopeTable:
    """The table for positions 0..positions-1, of pairs (2i, 2i+1) or else (i, i + D/2)."""
    frequencies = inverse_frequencies(rope, dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    cos, sin = angles.cos() * rope.amplitude, angles.sin() * rope.amplitude

    def spread(first: Tensor, second: Tensor) -> Tensor:
        pair = torch.stack((first, second), -1 if interleaved else -2)
        return pair.flatten(1).float().to(device)

    return RopeTable(spread(cos, cos), spread(-sin, sin))


def rotate_interleaved(x: Tensor, angles: Angles) -> Tensor:
    """Rotate pairs (2i, 2i+1) of x [..., D]; the angles broadcast. Result in x's dtype."""
    wide = x.float()
    swapped = torch.unflatten(wide, -1, (-1, 2)).flip(-1).flatten(-2)
    return (wide * angles.cos + swapped * angles.sin).to(x.dtype)


def rotate_half(x: Tensor, angles: Angles) -> Tensor:
    """Rotate pairs (i, i + D/2) of x [..., D]; the angles broadcast. Result in x's dtype."""
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return (wide * angles.cos + torch.cat((high, low), -1) * angles.sin).to(x.dtype)
