"""What the filters mean, and which settings a user may give.

They apply in this order: temperature, top-k, top-p over what top-k left, min-p. Likelihoods are
compared after the temperature, in float32. Equally likely tokens are kept or dropped together:
    top-k   keeps a token if fewer than k tokens are strictly likelier
    top-p   keeps it if the mass of the strictly likelier ones is under p (so the likeliest stays)
    min-p   keeps it if its probability is at least min_p times the likeliest token's
Masses have 44 fractional bits relative to the likeliest token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.errors import OptionError
from kdtree_engine.kernels.sample.reference import mass_limits, masses, scale, weigh

MOST_TEMPERATURE = 1e30
"""Far beyond that of an even choice; tensors of settings hold it in float32."""


def check_filters(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Raise OptionError for a setting out of range; 0, 0, 1 and 0 are those that do nothing."""
    if not 0 <= temperature <= MOST_TEMPERATURE:
        raise OptionError(
            f"temperature {temperature} must be 0 (greedy) or a positive number of at most "
            f"{MOST_TEMPERATURE:g}"
        )
    if top_k < 0:
        raise OptionError(f"top_k {top_k} must be 0 (off) or the number of tokens to keep")
    if not 0 < top_p <= 1:
        raise OptionError(f"top_p {top_p} must be over 0 and at most 1 (off)")
    if not 0 <= min_p <= 1:
        raise OptionError(f"min_p {min_p} must be between 0 (off) and 1")


def keep_mask(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """[R, V] bool: the tokens that may be drawn, from finite rows of logits [R, V] float32.

    The others are [R], as in kernels/sample, which draws from the same set without sorting. At
    temperature 0 only the first of the largest logits is kept.
    """
    greedy = temperature <= 0
    scaled = scale(logits, torch.where(greedy, 1.0, temperature))
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    weights = weigh(scaled).gather(1, order)
    ranks = torch.arange(logits.shape[1], device=logits.device).expand_as(order)
    # the rank of the first token as likely as this one: so many are strictly likelier
    starts = torch.ones_like(ranks, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] < ordered[:, :-1]
    likelier = torch.where(starts, ranks, 0).cummax(-1).values
    kept = (likelier < top_k[:, None]) | (top_k <= 0)[:, None]
    mass = torch.where(kept, masses(weights), 0)
    before = (mass.cumsum(-1) - mass).gather(1, likelier)
    limit = mass_limits(top_p, mass.sum(-1))
    kept &= before.double() < limit[:, None]
    kept &= weights >= min_p.double()[:, None]
    kept = torch.where(greedy[:, None], ranks == 0, kept)
    kept &= ordered > -torch.inf
    return torch.zeros_like(kept).scatter(1, order, kept)
