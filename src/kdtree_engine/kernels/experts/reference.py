"""sum_k w_k * down_e(silu(gate_e(x)) * up_e(x)) over the experts e chosen for each row.

Rows are gathered by expert into equal groups and all groups go through one batched product, which
is twice as fast on a CPU as a loop over experts. A row's place in its group does not change its
bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.kernels.matmul import padded_rows, row_bmm
from kdtree_engine.kernels.swiglu import swiglu


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One layer's routed experts: gate and up fused [E, H, 2 I], down [E, I, H]."""

    gate_up: Tensor
    down: Tensor


def routed_experts(x: Tensor, experts: Tensor, weights: Tensor, layer: ExpertWeights) -> Tensor:
    """x [R, H], experts [R, k] int64, weights [R, k] float32 -> float32 [R, H].

    The k contributions are added in the order given, in float32.
    """
    rows, top_k = experts.shape
    hit, groups, places = _group_rows(experts, layer.gate_up.shape[0])
    gate_up, down = layer.gate_up, layer.down
    if hit is not None:
        gate_up, down = gate_up.index_select(0, hit), down.index_select(0, hit)
    size = groups.shape[1]
    gathered = x.index_select(0, groups.flatten()).view(-1, size, x.shape[1])  # [E', size, H]
    out = row_bmm(swiglu(row_bmm(gathered, gate_up)), down)
    chosen = out.view(-1, x.shape[1]).index_select(0, places).view(rows, top_k, -1)
    scaled = chosen.float() * weights.unsqueeze(-1)
    total = scaled[:, 0]
    for column in range(1, top_k):
        total = total + scaled[:, column]
    return total


def _group_rows(experts: Tensor, count: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Equal groups of rows by expert.

    Returns the experts to run (None: all of them), their rows [E', size] (filled up with row 0),
    and for each of the R k choices its place in the flattened groups.
    """
    flat = experts.flatten()
    loads = torch.bincount(flat, minlength=count)
    order = torch.argsort(flat, stable=True)
    starts = torch.cumsum(loads, 0) - loads
    size = padded_rows(int(loads.max()), experts.device)
    hit: Tensor | None = None
    group_of = torch.arange(count, device=experts.device)
    busy = int((loads > 0).sum())
    if 2 * busy <= count:  # few experts: copy their weights together rather than run all of them
        hit = loads.nonzero().flatten()
        group_of[hit] = torch.arange(busy, device=experts.device)
    sorted_experts = flat[order]
    rank = torch.arange(flat.shape[0], device=experts.device) - starts[sorted_experts]
    slots = group_of[sorted_experts] * size + rank
    groups = torch.zeros(
        (busy if hit is not None else count) * size, dtype=torch.int64, device=experts.device
    )
    groups[slots] = order // experts.shape[1]
    places = torch.empty_like(flat)
    places[order] = slots
    return hit, groups.view(-1, size), places
