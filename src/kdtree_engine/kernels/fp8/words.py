"""FP8 values as kernels read them: two bytes a word, so that operands are made of whole words."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.fp8 import BLOCK, Fp8Tensor

PLANE = 32
"""Inputs of a plane: a word's low byte is an input of one plane, its high byte of the next."""

STEP = 2 * PLANE
"""Inputs that a run of PLANE words holds."""

RANDOM_SPREAD = 68.5
"""Standard deviation of random_words' values."""

_SCALES_SPREAD = (13 / 12) ** 0.5  # root of the mean square of uniform numbers in [0.5, 1.5)


def on_device(weight: Fp8Tensor, device: torch.device | str) -> Fp8Tensor:
    """The same weight on `device`."""
    return Fp8Tensor(weight.values.to(device), weight.scales.to(device))


def joined(first: Fp8Tensor, second: Fp8Tensor) -> Fp8Tensor:
    """`second` below `first`, whose rows fill its blocks."""
    assert first.shape[0] % BLOCK == 0, f"{first.shape[0]} rows above another weight"
    bytes_ = torch.cat([part.values.view(torch.uint8) for part in (first, second)])
    scales = torch.cat((first.scales, second.scales))
    return Fp8Tensor(bytes_.view(torch.float8_e4m3fn), scales)


def dense(weight: Tensor | Fp8Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A weight in `dtype` on `device`; an FP8 one moves as 8-bit values and is rounded there."""
    if isinstance(weight, Fp8Tensor):
        return on_device(weight, device).dequantize(dtype)
    return weight.to(device, dtype)


def words_of(values: Tensor) -> Tensor:
    """The bytes of `values` [..., 64 n], any type of one byte, as int16 words [..., 32 n].

    Word i of 64 inputs holds input i in its low byte and input 32 + i in its high one.
    """
    *outer, inputs = values.shape
    planes = values.view(torch.uint8).view(*outer, inputs // STEP, 2, PLANE)
    words = planes.transpose(-1, -2).contiguous().view(torch.int16)
    return words.view(*outer, inputs // 2)


def values_of(words: Tensor) -> Tensor:
    """The float8_e4m3fn values [..., 64 n] that `words_of` made words [..., 32 n] of."""
    *outer, count = words.shape
    pairs = words.contiguous().view(torch.uint8).view(*outer, count // PLANE, PLANE, 2)
    return pairs.transpose(-1, -2).reshape(*outer, 2 * count).view(torch.float8_e4m3fn)


def random_words(
    shape: tuple[int, ...],
    device: torch.device | str,
    generator: torch.Generator | None = None,
) -> Tensor:
    """int16 words of random values, made in place: half of the exponents, so no NaN; mean zero."""
    made = torch.empty(shape, dtype=torch.int16, device=device)
    made.random_(-(2**15), 2**15, generator=generator)
    return made.bitwise_and_(0xF7F7 - 0x10000)


def random_scales(
    shape: tuple[int, ...],
    spread: float,
    device: torch.device | str,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Uneven float32 scales that give weights of `random_words` the standard deviation `spread`."""
    each = spread / (RANDOM_SPREAD * _SCALES_SPREAD)
    made = torch.empty(shape, device=device)
    return made.uniform_(0.5 * each, 1.5 * each, generator=generator)
