"""Operator: log-softmax and the K likeliest tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import has_kernel, launch_options
from kdtree_engine.kernels.top_k import reference

MAX_K = 64
MAX_CHUNKS = 256


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
    fits = 0 < min(k, vocab) <= MAX_K and vocab <= MAX_CHUNKS * 4096 and rows > 0
    if has_kernel(logits) and fits:
        return _launch_top(logits, k, temperature, seeds, positions)
    return reference.top_log_probs(logits, k, temperature, seeds, positions)


def _launch_top(
    logits: Tensor,
    k: int,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    chunk: int = 4096,
    warps: int = 8,
) -> tuple[Tensor, Tensor]:
    """The operator by kernels. chunk: tokens a program, at least k; it changes no token."""
    from triton import next_power_of_2

    from kdtree_engine.kernels.top_k import kernel

    rows, vocab = logits.shape
    k = min(k, vocab)
    chunks = -(-vocab // chunk)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    count = next_power_of_2(chunks * k)
    assert k <= chunk and count < 2**15, f"{k} of {vocab} by {chunk}"

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    keys, ids = (empty(chunks, k, dtype=torch.int32) for _ in range(2))
    largest, sums = (empty(chunks, dtype=torch.float32) for _ in range(2))
    log_probs, tokens = empty(k, dtype=torch.float32), empty(k, dtype=torch.int64)
    options = launch_options(logits)
    fast = logits.device.type != "cpu"
    noise = None if temperature is None else (temperature, seeds, positions)
    kernel.candidates_kernel[chunks, rows](
        logits, *(noise or (None, None, None)), keys, ids, largest, sums,
        vocab, logits.stride(0), k, CHUNK=chunk, FAST=fast, num_warps=warps, **options,
    )  # fmt: skip
    kernel.merge_kernel[(rows,)](
        keys, ids, largest, sums, log_probs, tokens, chunks, k,
        COUNT=count, CHUNKS=next_power_of_2(chunks), KP=next_power_of_2(k), num_warps=8, **options,
    )  # fmt: skip
    return log_probs, tokens


__all__ = ["top_log_probs"]
