"""Operator: log-softmax and the K likeliest tokens of each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import has_kernel, launch_options
from kdtree_engine.kernels.top_k import reference

MAX_K = 64
MAX_VOCAB = 2**20

GROUP = 16
"""Runs a group, of which the largest value is kept, too."""

LOG_PROBS = 20
"""Likeliest tokens whose log-probabilities the engine keeps of a row. One number for every step and
request, so that one compilation makes all the bits; who wants fewer takes the first of them.
"""


class TokenLogProbs(NamedTuple):
    """Log-probabilities of R rows. chosen: [R] float32, of the given tokens. values: [R, k] float32
    and tokens: [R, k] int64, the likeliest first, of equal ones the smaller token.
    """

    chosen: Tensor
    values: Tensor
    tokens: Tensor


def top_log_probs(
    logits: Tensor,
    k: int,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    names: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of logits [R, V]: log-probabilities [R, k] float32 and ids [R, k]
    int64.

    log-probability = value - logsumexp over the whole vocabulary, in float32; likeliest first, of
    equal values the smaller token; non-finite ones come last, unless a row holds NaN or +inf,
    which makes all of its log-probabilities non-finite. k is cut to V.

    value = logit or, with temperature [R] float32, seeds and positions [R] int64, and T > 0 in the
    row, logit / T + noise of kernels/gumbel: the target's choice is the largest such value. names
    [V] int64, rising: the token that each column stands for, in the noise and among the ids that
    are returned; without it a column is its own token. The kernel's noise is right to 2^-16: it
    ranks guesses and decides no token. On a CUDA device two launches; k over 64 falls back to the
    reference, which waits for the device.
    """
    assert logits.ndim == 2 and logits.is_floating_point(), f"logits {list(logits.shape)}"
    if temperature is not None:
        assert seeds is not None and positions is not None
        assert temperature.dtype == torch.float32
        assert seeds.dtype == positions.dtype == torch.int64
        assert temperature.shape == seeds.shape == positions.shape == logits.shape[:1]
    rows, vocab = logits.shape
    assert names is None or (names.shape == (vocab,) and names.dtype == torch.int64)
    fits = 0 < min(k, vocab) <= MAX_K and vocab <= MAX_VOCAB and rows > 0
    if has_kernel(logits) and fits:
        return _launch_top(logits, k, temperature, seeds, positions, names)
    return reference.top_log_probs(logits, k, temperature, seeds, positions, names)


def token_log_probs(logits: Tensor, chosen: Tensor, k: int = LOG_PROBS) -> TokenLogProbs:
    """log-softmax of logits [R, V] float32, V < 2^19, at chosen [R] int64 and at the k likeliest
    tokens, k <= 64, cut to V.

    log-probability = logit - logsumexp over the vocabulary; a forbidden token's is -inf. The chosen
    token's is that in the list, to the bit, where it is there. A row with a NaN, with +inf or
    without a finite logit has no finite log-probability. A row's result depends on that row, V and
    k alone, to the bit. Two launches on CUDA, none of which waits.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and 0 < vocab < 2**19, f"logits [{rows}, {vocab}]"
    assert chosen.shape == (rows,) and chosen.dtype == torch.int64, f"chosen {list(chosen.shape)}"
    assert 0 < k <= MAX_K, f"{k} log-probabilities a row"
    if has_kernel(logits) and rows > 0:
        return _launch_log_probs(logits, chosen, k)
    return TokenLogProbs(*reference.token_log_probs(logits, chosen, k))


def _launch_log_probs(logits: Tensor, chosen: Tensor, k: int) -> TokenLogProbs:
    # The order of a sum may follow what Triton knows of the rows' alignment: so rows lie side by
    # side, and a part of a tensor that begins elsewhere is copied.
    if not (logits.is_contiguous() and logits.data_ptr() % 16 == 0):
        logits = logits.clone(memory_format=torch.contiguous_format)
    rows = logits.view(-1).view(logits.shape)  # a single row's stride could be anything
    picked = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    listed = _launch_top(rows, k, chosen=(chosen.contiguous(), picked))
    return TokenLogProbs(picked, *listed)


def _launch_top(
    logits: Tensor,
    k: int,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    names: Tensor | None = None,
    chunk: int = 1024,
    warps: int = 4,
    run: int = 0,
    merge_warps: int = 8,
    chosen: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The operator by kernels. chunk: tokens a program; run: tokens of which the largest is kept,
    a power of two from 4 on. They change no token. chosen: [R] int64, tokens whose
    log-probabilities are written to the other, [R] float32.
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
    listing, found, found_tokens = (empty(most, dtype=torch.int32) for _ in range(3))
    log_probs, tokens = empty(k, dtype=torch.float32), empty(k, dtype=torch.int64)
    options = {
        "SUB": run,
        "GROUP": GROUP,
        "HOT": temperature is not None,
        "NAMED": names is not None,
        "FAST": logits.device.type != "cpu",
        **launch_options(logits),
    }
    stride = logits.stride(0)
    kernel.top_runs_kernel[chunks, rows](
        logits, temperature, seeds, positions, names, keys, groups, largest, sums, vocab, stride,
        RUNS=chunk // run, num_warps=warps, **options,
    )  # fmt: skip
    kernel.merge_kernel[(rows,)](
        logits, temperature, seeds, positions, names, keys, groups, largest, sums,
        listing, found, found_tokens, log_probs, tokens, *(chosen or (None, None)),
        vocab, stride, runs, chunks, k,
        MOST=most, GROUPS=next_power_of_2(runs // GROUP), CHUNKS=next_power_of_2(chunks),
        num_warps=merge_warps, **options,
    )  # fmt: skip
    return log_probs, tokens


__all__ = ["LOG_PROBS", "TokenLogProbs", "token_log_probs", "top_log_probs"]
