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


CHUNK = 4096
"""Tokens a program of the first kernel, a multiple of RUN."""

SHELF = 1024
"""Tokens that the mass of top-k is found among; more take passes over the row."""


def _launch_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    chunk: int = CHUNK,
    margin: float = MARGIN,
    warps: int = 8,
    rows_a_tile: int = 8,
) -> Sampled:
    """The operator by kernels. None of chunk, margin (at least MARGIN), warps and tiles changes a
    token.
    """
    from kdtree_engine.kernels.sample import kernel

    rows, vocab = logits.shape
    chunks = -(-vocab // chunk)
    runs = chunks * (chunk // RUN)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    settings = (temperature, top_k, top_p, min_p, seeds, positions)
    temperature, top_k, top_p, min_p, seeds, positions = (one.contiguous() for one in settings)

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=logits.device)

    run_max, run_bound, run_sum = (empty(runs, torch.float32) for _ in range(3))
    run_first, listing, shelf = (empty(size, torch.int32) for size in (runs, runs, SHELF))
    out = Sampled(empty(1, torch.int64).view(rows), empty(1, torch.bool).view(rows))
    if rows == 0:
        return out
    sizes = {"SUB": RUN, "FAST": logits.device.type != "cpu", **launch_options(logits)}
    stride = logits.stride(0)
    kernel.runs_kernel[chunks, rows](
        logits, temperature, top_p, seeds, positions, run_max, run_first, run_bound, run_sum,
        vocab, stride, RUNS=chunk // RUN, WHOLE=vocab % chunk == 0, num_warps=warps, **sizes,
    )  # fmt: skip
    kernel.choose_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, seeds, positions,
        run_max, run_first, run_bound, run_sum, listing, shelf, *out, vocab, stride, runs,
        RUNS=_power(runs), ROWS=rows_a_tile, SHELF=SHELF, MARGIN=margin, num_warps=8, **sizes,
    )  # fmt: skip
    return out


def _power(count: int) -> int:
    """The smallest power of two from `count` on."""
    return 1 << (count - 1).bit_length()


__all__ = ["Sampled", "sample"]
