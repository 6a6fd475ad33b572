"""Expert layers: experts, hidden and intermediate width, experts a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One layer of experts."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int


CASES = (
    Case("packaged", 16, 256, 64, 4),
    Case("tiny", 8, 64, 32, 2),
    Case("single", 3, 32, 16, 1),
    Case("wide", 4, 640, 48, 2),
)


K26_RANK = Case("k2.6, one rank of eight", 384, 7168, 256, 8)
V3_RANK = Case("deepseek-v3, one rank of eight", 256, 7168, 256, 8)
RANK_SHARED = 256


def launch_everything(device: torch.device, rows: tuple[int, ...] = (1, 64, 4096)) -> None:
    """Every launch of the mixture whose experts are FP8 (K2-Instruct has K2.6's shapes) or dense;
    meta tensors will do.

    For tests that compile what is launched; INT4 ones are launched by K2.6's forward.
    """
    from kdtree_engine.kernels.experts import (
        combine_add_norm,
        expert_mlp,
        pack_experts,
        random_packed_experts,
    )
    from kdtree_engine.kernels.router import RouterSettings, route_rows

    case, shared = K26_RANK, RANK_SHARED
    hidden, inner = case.hidden, case.intermediate

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    dense = [(empty(2 * inner, hidden), empty(hidden, inner))] * 2
    layers = (
        random_packed_experts(case.experts, hidden, inner, shared, device, planes=2),
        pack_experts(dense, 2, empty(hidden, shared), torch.bfloat16, device),
    )
    settings = RouterSettings(case.top_k, 1, 1, True, 2.827)
    bias = empty(case.experts, dtype=torch.float32)
    for count in rows:
        parts = empty(8, count, case.experts + 2 * shared, dtype=torch.float32)
        routing = route_rows(parts, bias, settings, shared)
        for packed in layers:
            x, norm = empty(count, hidden), empty(hidden)
            out = expert_mlp(x, routing, packed)
            combine_add_norm(out.down_out, routing.weights, out.shared_out, x, norm, 1e-5)
