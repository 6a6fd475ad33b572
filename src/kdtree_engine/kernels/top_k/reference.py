"""Candidates of each drafted depth."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.gumbel import gumbel


def perturb(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    names: Tensor | None = None,
) -> Tensor:
    """logits / T + noise of rows with T > 0, the others as they are; see the operator."""
    hot = temperature[:, None] > 0
    if names is None:
        noise = gumbel(seeds, positions, logits.shape[-1])
    else:  # of every token up to the last that is named
        noise = gumbel(seeds, positions, int(names[-1]) + 1).index_select(1, names)
    scaled = logits / torch.where(hot, temperature[:, None], 1.0)
    return torch.where(hot, scaled + noise, logits)


def top_log_probs(
    logits: Tensor,
    k: int,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    names: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the operator."""
    logits = logits.float()
    if temperature is not None and bool((temperature > 0).any()):  # noise costs more than the rest
        assert seeds is not None and positions is not None
        logits = perturb(logits, temperature, seeds, positions, names)
    values, ids = _largest(logits, min(k, logits.shape[-1]))
    tokens = ids if names is None else names[ids]
    return values - torch.logsumexp(logits, -1, keepdim=True), tokens


def _largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of [R, V], equal ones by rising id. topk itself leaves their order open."""
    values, ids = logits.topk(k, dim=-1)
    if k == 0 or len(logits) == 0:
        return values, ids
    if bool(((logits >= values[:, -1:]).sum(-1) == k).all()):  # no choice among equals; no NaN
        ids = ids.sort(-1).values
        values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        return values, ids.gather(-1, order)
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]
