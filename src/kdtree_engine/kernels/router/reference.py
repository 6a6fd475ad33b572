"""Expert choice of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.scalar import scalar


@dataclass(frozen=True)
class RouterSettings:
    """Experts a token goes to, group limits (1 group: none), and how weights are scaled."""

    top_k: int
    groups: int
    top_groups: int
    normalise: bool
    scale: float


def route(logits: Tensor, bias: Tensor, settings: RouterSettings) -> tuple[Tensor, Tensor]:
    """Experts and weights [R, top_k] from router logits [R, E] and the choice bias [E], both
    float32.

    Weights come from the scores without the bias; they are renormalised (if asked) and scaled once.
    Returned in the router's order of choice, which is the order in which outputs are added. Equal
    scores go to the smaller index.
    """
    one = scalar(1.0)
    scores = one / (torch.exp(-logits) + one)
    choice = scores + bias
    if settings.groups > 1:
        choice = _keep_top_groups(choice, settings)
    experts = _largest(choice, settings.top_k)
    weights = scores.gather(1, experts)
    if settings.normalise:
        weights = weights / (weights.sum(1, keepdim=True) + scalar(1e-20))
    return experts, weights * scalar(settings.scale)


def _keep_top_groups(choice: Tensor, settings: RouterSettings) -> Tensor:
    """-inf outside the best groups; a group's score is the sum of its two best experts."""
    grouped = choice.view(choice.shape[0], settings.groups, -1)
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values
    group_scores = best[..., 0] + best[..., 1] if best.shape[-1] > 1 else best[..., 0]
    kept = _largest(group_scores, settings.top_groups)
    mask = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
    return grouped.masked_fill(~mask.unsqueeze(-1), float("-inf")).flatten(1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest, falling; equal ones by index, which topk does not promise."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
