"""Draws by perturbed argmax, filters tested on the picked token instead of sorting the row.

With x = (logit - max) / temperature and w = exp(x), a token may be drawn if
    top-k   fewer than k tokens are strictly likelier,
    top-p   the mass of the strictly likelier tokens is under p of the mass that top-k left,
    min-p   w >= min_p, the likeliest token having w = 1.
Each condition also holds for every likelier token. So when the pick among a set fails, all tokens
that may be drawn are strictly likelier than it, and the search goes on among those.

Masses are integers, floor(w 2^44): their sums are exact in any order, which keeps a row's result
independent of the others and of the device's way of adding. They fit in 63 bits below 2^19 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kdtree_engine.kernels.gumbel import gumbel

MASS_ONE = 2.0**44
# As in kernels/gumbel: exp must take the same path for an element whatever the number of rows.
ROW_UNIT = 64


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """x = (logit - max) / temperature, float32 [R, V] from logits [R, V] and temperature [R] > 0.

    The maximum goes first, so that a tiny temperature gives -inf but never a NaN.
    """
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def weigh(scaled: Tensor) -> Tensor:
    """w = exp(x) in float64, [R, V]; the likeliest token has 1."""
    vocab = scaled.shape[1]
    padding = -vocab % ROW_UNIT
    wide = F.pad(scaled, (0, padding), value=-torch.inf) if padding else scaled
    return wide.double().exp()[:, :vocab]


def masses(weights: Tensor) -> Tensor:
    """floor(w 2^44) as int64."""
    return (weights * MASS_ONE).long()


def top_k_levels(scaled: Tensor, top_k: Tensor) -> Tensor:
    """[R, 1]: the k-th largest x of each row, -inf where top_k is 0 or reaches the vocabulary."""
    vocab = scaled.shape[1]
    active = (top_k > 0) & (top_k < vocab)
    widest = int(torch.where(active, top_k, 0).max())
    if widest == 0:
        return torch.full_like(scaled[:, :1], -torch.inf)
    largest = scaled.topk(widest, dim=-1).values
    index = torch.where(active, top_k - 1, 0)[:, None]
    return torch.where(active[:, None], largest.gather(1, index), -torch.inf)


def mass_limits(top_p: Tensor, total: Tensor) -> Tensor:
    """[R] float64: a token needs less likelier mass than this. The likeliest, with 0, passes."""
    limit = (top_p.double() * total.double()).clamp(min=1.0)
    return torch.where(top_p < 1, limit, torch.inf)


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, noise: Tensor
) -> Tensor:
    """Tokens [R] int64 of rows that are all sampled: logits, noise [R, V], the others [R]."""
    scaled = scale(logits, temperature)
    score = scaled + noise
    by_mass, by_weight = bool((top_p < 1).any()), bool((min_p > 0).any())
    if not (by_mass or by_weight or bool((top_k > 0).any())):
        return score.argmax(-1)
    kept = scaled >= top_k_levels(scaled, top_k)
    score = torch.where(kept, score, -torch.inf)
    if not (by_mass or by_weight):
        return score.argmax(-1)
    weights = weigh(scaled)
    if by_weight:
        score = torch.where(weights >= min_p.double()[:, None], score, -torch.inf)
    if not by_mass:
        return score.argmax(-1)
    mass = masses(weights)
    limit = mass_limits(top_p, torch.where(kept, mass, 0).sum(-1))
    return descend(score, scaled, mass, limit)


def descend(score: Tensor, scaled: Tensor, mass: Tensor, limit: Tensor) -> Tensor:
    """The first pick of each row whose strictly likelier tokens weigh less than its limit.

    score, scaled, mass [R, V], limit [R]; the result is [R] int64. Ends because the likeliest
    token has nothing above it.
    """
    picks = torch.empty(len(score), dtype=torch.int64, device=score.device)
    rows = torch.arange(len(score), device=score.device)  # those still searching
    while len(rows):
        pick = score.argmax(-1)
        picks[rows] = pick
        likelier = scaled > scaled.gather(1, pick[:, None])
        failed = torch.where(likelier, mass, 0).sum(-1).double() >= limit
        again = failed.nonzero().flatten()
        score = torch.where(likelier[again], score[again], -torch.inf)
        rows, scaled, mass, limit = rows[again], scaled[again], mass[again], limit[again]
    return picks


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """See the operator."""
    best, tokens = logits.max(-1)  # NaN propagates; of equal logits the first
    finite = torch.isfinite(best)
    hot = ((temperature > 0) & finite).nonzero().flatten()
    if len(hot) == 0:
        return tokens, finite
    if len(hot) < len(logits):
        logits, seeds, positions = logits[hot], seeds[hot], positions[hot]
        temperature, top_k, top_p, min_p = temperature[hot], top_k[hot], top_p[hot], min_p[hot]
    noise = gumbel(seeds, positions, logits.shape[1])
    tokens[hot] = draw(logits, temperature, top_k, top_p, min_p, noise)
    return tokens, finite
