"""Candidates of each drafted depth."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.gumbel import gumbel
from kdtree_engine.kernels.sample.reference import MASS_ONE, ROW_UNIT, masses, weigh


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


def log_sums(logits: Tensor) -> Tensor:
    """log-sum-exp [R] float32 of logits [R, V] float32, V < 2^19.

    torch's own adds up a row in an order that follows the number of rows. Masses are integers, so
    their sum has no order; cutting them to 44 bits moves the result by less than 2^-25.
    """
    top = logits.amax(-1, keepdim=True)
    base = torch.where(top == -torch.inf, 0.0, top)
    mass = masses(weigh(logits - base)).sum(-1, keepdim=True).double() / MASS_ONE
    # a whole vector a row, so that every row's logarithm takes the same path
    logarithm = mass.repeat(1, ROW_UNIT).log()[:, :1]
    return (base.double() + logarithm).float()[:, 0]


def token_log_probs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """See the operator."""
    total = log_sums(logits)[:, None]
    values, tokens = _largest(logits, min(k, logits.shape[1]))
    return (logits.gather(1, chosen[:, None]) - total)[:, 0], values - total, tokens


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
