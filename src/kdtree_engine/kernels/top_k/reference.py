"""Candidates of each drafted depth."""

from __future__ import annotations

import torch
from torch import Tensor


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of logits [H, V]: log-probabilities [H, k] float32 and ids [H, k]
    int64.

    log-probability = logit - logsumexp over the whole vocabulary, in float32; likeliest first. k is
    cut to V. Temperature is not applied to a drafter.
    """
    logits = logits.float()
    top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return top.values - torch.logsumexp(logits, -1, keepdim=True), top.indices
