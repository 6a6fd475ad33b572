"""Operator: one token per row of logits, greedy or drawn with that row's own settings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import has_kernel, launch_options
from kdtree_engine.kernels.sample import reference

RUN = 256
"""Tokens whose largest logit is kept, to find a row's likeliest tokens without reading it."""

MARGIN = 2.0**-14
"""Over twice the error of an approximate score; see the kernels' header."""


class Sampled(NamedTuple):
    """tokens: [R] int64. finite: [R] bool, False where the row cannot be sampled (see `sample`)."""

    tokens: Tensor
    finite: Tensor


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Sampled:
    """Sample logits [R, V] float32, V < 2^19; every setting is [R].

    temperature float32, 0 = the first of the largest logits; top_k int64, 0 = off; top_p float32,
    1 = off; min_p float32, 0 = off; seeds and positions int64, as in kernels/gumbel.
    A logit of -inf is a forbidden token. A row with a NaN, with +inf, or with no token left has
    finite = False and a meaningless token. A row's result depends on that row alone, to the bit.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and 0 < vocab < 2**19, f"logits [{rows}, {vocab}]"
    for value in (temperature, top_p, min_p):
        assert value.shape == (rows,) and value.dtype == torch.float32
    for value in (top_k, seeds, positions):
        assert value.shape == (rows,) and value.dtype == torch.int64
    settings = (temperature, top_k, top_p, min_p, seeds, positions)
    if has_kernel(logits):
        return _launch_sample(logits, *settings)
    return Sampled(*reference.sample(logits, *settings))


def chunk_of(rows: int) -> int:
    """Tokens a program, a multiple of RUN: at 4096 only two programs fit an SM (189 registers)."""
    return 2048 if rows <= 256 else 4096


def _launch_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    chunk: int = 0,
    margin: float = MARGIN,
) -> Sampled:
    """The operator by kernels. Neither chunk nor margin (at least MARGIN) changes a token."""
    from kdtree_engine.kernels.sample import kernel

    rows, vocab = logits.shape
    chunk = chunk or chunk_of(rows)
    chunks, runs = -(-vocab // chunk), chunk // RUN
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    settings = (temperature, top_k, top_p, min_p, seeds, positions)
    temperature, top_k, top_p, min_p, seeds, positions = (one.contiguous() for one in settings)

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=logits.device)

    largest, first = empty(chunks, torch.float32), empty(chunks, torch.int32)
    run_max, listing = empty(chunks * runs, torch.float32), empty(chunks * runs, torch.int32)
    score, pick = empty(chunks, torch.float32), empty(chunks, torch.int32)
    mass = empty(chunks, torch.int64)
    out = Sampled(empty(1, torch.int64).view(rows), empty(1, torch.bool).view(rows))
    if rows == 0:
        return out
    options = launch_options(logits)
    sizes = {"SUB": RUN, **options}
    exact = {"MARGIN": margin, "FAST": logits.device.type != "cpu", "CHUNKS": _power(chunks)}
    stride = logits.stride(0)
    kernel.largest_kernel[chunks, rows](
        logits, largest, first, run_max, vocab, stride, RUNS=runs, **sizes
    )
    kernel.perturb_kernel[chunks, rows](
        logits, temperature, top_p, seeds, positions, largest, score, pick, mass,
        vocab, stride, RUNS=runs, **exact, **sizes,
    )  # fmt: skip
    kernel.choose_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, seeds, positions, largest, first, run_max,
        score, pick, mass, listing, *out, vocab, stride, chunks, chunks * runs,
        RUNS=_power(chunks * runs), ROWS=16, num_warps=8, **exact, **sizes,
    )  # fmt: skip
    return out


def _power(count: int) -> int:
    """The smallest power of two from `count` on."""
    return 1 << (count - 1).bit_length()


__all__ = ["Sampled", "sample"]
