"""DeepSeek-V3 expert choice: sigmoid scores, a bias for the choice only, group limits.

Equal scores go to the expert (and the group) of the smaller index.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import launch_options
from kdtree_engine.kernels.router.blocks import Blocks, block_bound, block_tokens, group_by_sort
from kdtree_engine.kernels.router.reference import RouterSettings, route

GROUP_SLOTS = 512
"""The most slots that one program groups; more go through torch's sort."""

SHARED_WIDTH = 256

ROUTE_WARPS = 1
"""Warps of a row: with one a maximum stays in the warp."""


class Routing(NamedTuple):
    """What one layer's rows do: experts [R, k] int32 and weights [R, k] float32, both in the order
    of choice; `shared` [R, Is], the shared expert's inner values, where its product was part of the
    input; the blocks of choices by expert.
    """

    experts: Tensor
    weights: Tensor
    shared: Tensor | None
    blocks: Blocks


def route_rows(
    parts: Tensor,
    bias: Tensor,
    settings: RouterSettings,
    shared_inner: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Routing:
    """Choices, weights and blocks from a dense product's parts [S, R, N] float32, on the device.

    Columns: the gate's E logits, the shared expert's gate and up, 2 shared_inner, and perhaps more
    that are not read. bias [E] float32. `dtype`: the activations', for the shared values. One row
    is one launch, up to GROUP_SLOTS choices are two; a row's results do not depend on the others.
    """
    rows, top_k, experts = parts.shape[1], settings.top_k, bias.shape[0]
    tokens = block_tokens(rows, top_k, experts)
    routing = _launch_route(parts, bias, settings, shared_inner, dtype, tokens, ROUTE_WARPS)
    if rows == 1:
        return routing
    return routing._replace(blocks=group_choices(routing.experts, experts, tokens))


def group_choices(chosen: Tensor, experts: int, tokens: int) -> Blocks:
    """Blocks of at most `tokens` slots of one expert, from chosen [R, k] int32 below `experts`."""
    if chosen.numel() > GROUP_SLOTS:
        return group_by_sort(chosen, experts, tokens)
    return _launch_group(chosen, experts, tokens, 4)


def _empty_blocks(rows: int, top_k: int, experts: int, tokens: int, device: torch.device) -> Blocks:
    bound = block_bound(rows, top_k, experts, tokens)
    return Blocks(
        torch.empty(bound, dtype=torch.int32, device=device),
        torch.empty(bound, tokens, dtype=torch.int32, device=device),
    )


def _launch_route(
    parts: Tensor,
    bias: Tensor,
    settings: RouterSettings,
    shared_inner: int,
    dtype: torch.dtype,
    tokens: int,
    warps: int,
) -> Routing:
    """One launch. The blocks are filled in where there is one row."""
    from triton import next_power_of_2

    from kdtree_engine.kernels.router.kernel import route_kernel

    (segments, rows, columns), experts = parts.shape, bias.shape[0]
    top_k, groups, device = settings.top_k, settings.groups, parts.device
    assert parts.dtype == bias.dtype == torch.float32, f"{parts.dtype} and {bias.dtype}"
    assert parts.is_contiguous() and columns >= experts + 2 * shared_inner, f"{parts.shape}"
    assert experts < 0x7FFF and 0 < top_k <= experts and experts % groups == 0, f"{settings}"
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    shared = torch.empty(rows, shared_inner, dtype=dtype, device=device)
    blocks = _empty_blocks(rows, top_k, experts, tokens, device)
    grid = rows * (1 + -(-shared_inner // SHARED_WIDTH))
    route_kernel[(grid,)](
        parts, bias, chosen, weights, shared, blocks.expert, blocks.slots, rows, columns,
        SEGMENTS=segments, EXPERTS=experts, TOP_K=top_k, GROUPS=groups,
        TOP_GROUPS=settings.top_groups, NORMALISE=settings.normalise, SCALE=settings.scale,
        SHARED_INNER=shared_inner, SHARED_WIDTH=SHARED_WIDTH, ALONE=rows == 1, T=tokens,
        G=next_power_of_2(groups), P=next_power_of_2(experts // groups), K=next_power_of_2(top_k),
        num_warps=warps, **launch_options(parts),
    )  # fmt: skip
    return Routing(chosen, weights, shared if shared_inner else None, blocks)


def _launch_group(chosen: Tensor, experts: int, tokens: int, warps: int) -> Blocks:
    """One launch of one program."""
    from triton import next_power_of_2

    from kdtree_engine.kernels.router.kernel import group_kernel

    assert chosen.dtype == torch.int32 and chosen.is_contiguous(), f"{chosen.dtype}"
    (rows, top_k), slots = chosen.shape, chosen.numel()
    blocks = _empty_blocks(rows, top_k, experts, tokens, chosen.device)
    bound = blocks.expert.shape[0]
    group_kernel[(1,)](
        chosen, blocks.expert, blocks.slots, slots, BOUND=bound, BOUND_P=next_power_of_2(bound),
        P=next_power_of_2(slots), T=tokens, num_warps=warps, **launch_options(chosen),
    )  # fmt: skip
    return blocks


__all__ = [
    "Blocks",
    "RouterSettings",
    "Routing",
    "block_bound",
    "block_tokens",
    "group_choices",
    "route",
    "route_rows",
]
