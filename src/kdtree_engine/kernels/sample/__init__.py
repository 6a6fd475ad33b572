"""Operator: one token per row of logits, greedy or drawn with that row's own settings."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.gumbel import NoiseBounds
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
    noise: NoiseBounds | None = None,
) -> Sampled:
    """Sample logits [R, V] float32, V < 2^19; every setting is [R].

    temperature float32, 0 = the first of the largest logits; top_k int64, 0 = off; top_p float32,
    1 = off; min_p float32, 0 = off; seeds and positions int64, as in kernels/gumbel.
    noise: of B requests with as many rows each, one after the other, whose seeds and temperatures
    are their rows'; saves drawing the noise of every row, and changes no token. Rows at positions
    beyond it are drawn for.
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
        return _launch_sample(logits, *settings, noise)
    return Sampled(*reference.sample(logits, *settings))


CHUNK = 4096
"""Tokens a program of the first kernel, a multiple of RUN."""

SHELF = 1024
"""Tokens that the mass of top-k is found among; more take passes over the row."""


class Runs(NamedTuple):
    """What the first kernel tells of every run of RUN tokens, [R, runs] each; see the kernels."""

    largest: Tensor
    first: Tensor
    bound: Tensor
    sum: Tensor


def _launch_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    noise: NoiseBounds | None = None,
    chunk: int = CHUNK,
    margin: float = MARGIN,
    warps: int = 8,
    **tiles: Any,
) -> Sampled:
    """The operator by kernels. None of chunk, margin (at least MARGIN), warps and `tiles` (those of
    _choose) changes a token.
    """
    settings = (temperature, top_k, top_p, min_p, seeds, positions)
    temperature, top_k, top_p, min_p, seeds, positions = (one.contiguous() for one in settings)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    runs = _find_runs(logits, temperature, top_p, seeds, positions, noise, chunk, warps)
    settings = (temperature, top_k, top_p, min_p, seeds, positions)
    return _choose(logits, settings, runs, margin, **tiles)


def _find_runs(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    noise: NoiseBounds | None,
    chunk: int = CHUNK,
    warps: int = 8,
) -> Runs:
    from kdtree_engine.kernels.sample.kernel import runs_kernel

    rows, vocab = logits.shape
    chunks = -(-vocab // chunk)

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, chunks * (chunk // RUN), dtype=dtype, device=logits.device)

    floats = [empty(torch.float32) for _ in range(3)]
    runs = Runs(floats[0], empty(torch.int32), *floats[1:])
    values, contexts, depths, each = None, None, 0, 1
    if noise is not None:
        (values, contexts), depths = noise, noise.values.shape[1]
        each = rows // max(len(values), 1)
        assert values.shape[2] == vocab and each * len(values) == rows and values.is_contiguous()
    if rows:
        runs_kernel[chunks, rows](
            logits, temperature, top_p, seeds, positions, values, contexts, *runs,
            vocab, logits.stride(0), depths, each, RUNS=chunk // RUN, SUB=RUN,
            WHOLE=vocab % chunk == 0, num_warps=warps, **_options(logits),
        )  # fmt: skip
    return runs


def _choose(
    logits: Tensor,
    settings: tuple[Tensor, ...],
    runs: Runs,
    margin: float = MARGIN,
    rows_a_tile: int = 4,
    wide: int = 16,
    choose_warps: int = 8,
) -> Sampled:
    from kdtree_engine.kernels.sample.kernel import choose_kernel

    rows, vocab = logits.shape
    count = runs.first.shape[1]

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    listing, shelf = (empty(size, dtype=torch.int32) for size in (count, SHELF))
    out = Sampled(empty(dtype=torch.int64), empty(dtype=torch.bool))
    if rows:
        choose_kernel[(rows,)](
            logits, *settings, *runs, listing, shelf, *out, vocab, logits.stride(0), count,
            RUNS=_power(count), ROWS=rows_a_tile, WIDE=wide, SUB=RUN, SHELF=SHELF,
            MARGIN=margin, num_warps=choose_warps, **_options(logits),
        )  # fmt: skip
    return out


def _options(logits: Tensor) -> dict[str, Any]:
    return {"FAST": logits.device.type != "cpu", **launch_options(logits)}


def _power(count: int) -> int:
    """The smallest power of two from `count` on."""
    return 1 << (count - 1).bit_length()


__all__ = ["Sampled", "sample"]
