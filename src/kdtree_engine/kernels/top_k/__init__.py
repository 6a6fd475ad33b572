"""Operator: log-softmax and the K likeliest tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import has_kernel, launch_options
from kdtree_engine.kernels.top_k import reference

MAX_K = 64
MAX_VOCAB = 2**20

GROUP = 16
"""Runs a group, of which the largest value is kept, too."""


def top_log_probs(
    logits: Tensor,
    k: int,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of logits [R, V]: log-probabilities [R, k] float32 and ids [R, k]
    int64.

    log-probability = value - logsumexp over the whole vocabulary, in float32; likeliest first, of
    equal values the smaller token; non-finite ones come last, unless a row holds NaN or +inf,
    which makes all of its log-probabilities non-finite. k is cut to V.

    value = logit or, with temperature [R] float32, seeds and positions [R] int64, and T > 0 in the
    row, logit / T + noise of kernels/gumbel: the target's choice is the largest such value. The
    kernel's noise is right to 2^-16: it ranks guesses and decides no token. On a CUDA device two
    launches; k over 64 falls back to the reference, which waits for the device.
    """
    assert logits.ndim == 2 and logits.is_floating_point(), f"logits {list(logits.shape)}"
    if temperature is not None:
        assert seeds is not None and positions is not None
        assert temperature.dtype == torch.float32
        assert seeds.dtype == positions.dtype == torch.int64
        assert temperature.shape == seeds.shape == positions.shape == logits.shape[:1]
    rows, vocab = logits.shape
    fits = 0 < min(k, vocab) <= MAX_K and vocab <= MAX_VOCAB and rows > 0
    if has_kernel(logits) and fits:
        return _launch_top(logits, k, temperature, seeds, positions)
    return reference.top_log_probs(logits, k, temperature, seeds, positions)


def _launch_top(
    logits: Tensor,
    k: int,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    chunk: int = 1024,
    warps: int = 4,
    run: int = 0,
    merge_warps: int = 8,
) -> tuple[Tensor, Tensor]:
    """The operator by kernels. chunk: tokens a program; run: tokens of which the largest is kept,
    a power of two from 4 on. They change no token.
    """
    from triton import next_power_of_2

    from kdtree_engine.kernels.top_k import kernel

    rows, vocab = logits.shape
    k = min(k, vocab)
    run = run or max(32, next_power_of_2(vocab) >> 13)
    chunk = max(chunk, run * GROUP)
    chunks = -(-vocab // chunk)
    runs = chunks * (chunk // run)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    most = 2 * next_power_of_2(k)
    assert runs // GROUP < 2**14 and most * max(run, GROUP) < 2**15, f"runs of {run} of {vocab}"

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    keys, groups = (empty(count, dtype=torch.int32) for count in (runs, runs // GROUP))
    largest, sums = (empty(chunks, dtype=torch.float32) for _ in range(2))
    listing, found, names = (empty(most, dtype=torch.int32) for _ in range(3))
    log_probs, tokens = empty(k, dtype=torch.float32), empty(k, dtype=torch.int64)
    options = {
        "SUB": run,
        "GROUP": GROUP,
        "HOT": temperature is not None,
        "FAST": logits.device.type != "cpu",
        **launch_options(logits),
    }
    stride = logits.stride(0)
    kernel.top_runs_kernel[chunks, rows](
        logits, temperature, seeds, positions, keys, groups, largest, sums, vocab, stride,
        RUNS=chunk // run, num_warps=warps, **options,
    )  # fmt: skip
    kernel.merge_kernel[(rows,)](
        logits, temperature, seeds, positions, keys, groups, largest, sums, listing, found, names,
        log_probs, tokens, vocab, stride, runs, chunks, k,
        MOST=most, GROUPS=next_power_of_2(runs // GROUP), CHUNKS=next_power_of_2(chunks),
        num_warps=merge_warps, **options,
    )  # fmt: skip
    return log_probs, tokens


__all__ = ["top_log_probs"]
