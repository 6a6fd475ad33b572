"""Operator: the noise that turns an argmax into a draw.

Layout, for every implementation:

    key      seed as two words, low first (a negative int64 is its 64-bit pattern)
    counter  (position low, position high, token // 4, 0); the last word numbers the stream: 0 here
    word     output word token % 4 of Philox4x32-10
    uniform  (word + 0.5) * 2^-32 in float64: exact, within [2^-33, 1 - 2^-33]
    noise    -log(-log(uniform)) in float64, rounded to float32: within [-3.14, 22.9]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.gumbel import reference
from kdtree_engine.kernels.launch import has_kernel, launch_options


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [R, vocab] float32 for R pairs of seed and position, [R] int64 each.

    A row depends on its own seed and position alone, to the bit. positions: that of the token
    being chosen, so rows of a tree at one depth share their noise.
    """
    assert seeds.ndim == 1 and seeds.shape == positions.shape, (
        f"seeds {list(seeds.shape)} and positions {list(positions.shape)}"
    )
    assert seeds.dtype == positions.dtype == torch.int64 and seeds.device == positions.device
    assert vocab > 0
    if has_kernel(seeds):
        return _launch_gumbel(seeds, positions, vocab)
    return reference.gumbel(seeds, positions, vocab)


def _launch_gumbel(seeds: Tensor, positions: Tensor, vocab: int, block: int = 256) -> Tensor:
    from kdtree_engine.kernels.gumbel.kernel import gumbel_kernel

    rows = len(seeds)
    noise = torch.empty(rows, vocab, dtype=torch.float32, device=seeds.device)
    if rows:
        grid = (-(-vocab // (4 * block)), rows)
        options = launch_options(seeds)
        gumbel_kernel[grid](
            seeds.contiguous(), positions.contiguous(), noise, vocab, BLOCK=block, **options
        )
    return noise


class NoiseBounds(NamedTuple):
    """values: [B, depths, vocab] float16, none smaller than the noise at contexts + 1 + depth, for
    requests whose temperature is not 0. contexts: [B] int32 or int64.
    """

    values: Tensor
    contexts: Tensor


class NoiseWanted(NamedTuple):
    """Bounds of `depths` tokens each of B requests, of `vocab` numbers a token. seeds [B] int64,
    temperature [B] float32.
    """

    seeds: Tensor
    temperature: Tensor
    depths: int
    vocab: int


def noise_bounds(wanted: NoiseWanted, contexts: Tensor) -> NoiseBounds | None:
    """Bounds of the noise of the next tokens after contexts [B] committed ones.

    The rows of a draft tree at one depth share their noise, and whoever looks for their largest
    perturbed logit reads the bounds instead of drawing the noise for every row. None where
    operators run without kernels: nobody would read them.
    """
    seeds, temperature, depths, vocab = wanted
    assert seeds.shape == contexts.shape == temperature.shape and depths > 0 and vocab > 0
    if not has_kernel(seeds):
        return None
    return _launch_bounds(seeds, contexts, temperature, depths, vocab)


def _launch_bounds(
    seeds: Tensor,
    contexts: Tensor,
    temperature: Tensor,
    depths: int,
    vocab: int,
    block: int = 256,
) -> NoiseBounds:
    from kdtree_engine.kernels.gumbel.kernel import bounds_kernel

    values = torch.empty(len(seeds), depths, vocab, dtype=torch.float16, device=seeds.device)
    if len(seeds):
        bounds_kernel[-(-vocab // (4 * block)), depths, len(seeds)](
            seeds.contiguous(), contexts.contiguous(), temperature.contiguous(), values, vocab,
            BLOCK=block, FAST=seeds.device.type != "cpu", **launch_options(seeds),
        )  # fmt: skip
    return NoiseBounds(values, contexts)


__all__ = ["NoiseBounds", "NoiseWanted", "gumbel", "noise_bounds"]
