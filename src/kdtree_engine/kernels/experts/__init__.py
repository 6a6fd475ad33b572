"""Routed experts: each row through its own few gated MLPs, added in the router's order.

`routed_experts` is the CPU's operator. On a device three launches do the same: `expert_mlp` (up,
then down with the shared expert) and `combine_add_norm`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.experts.packing import (
    PackedExperts,
    TiledWeight,
    pack_experts,
    random_packed_experts,
)
from kdtree_engine.kernels.experts.reference import ExpertWeights, routed_experts
from kdtree_engine.kernels.launch import launch_options, multiprocessors, precise
from kdtree_engine.kernels.router import Blocks, Routing

NORM_WARPS = 8
"""Warps of a row's combination, at any number of rows: the sum in its norm depends on them."""


class Tuning(NamedTuple):
    """How a product is launched; no result depends on it.

    stages: blocks of weights in flight; shared_stages: the same for the shared expert's part of
    down. ptx: unpack INT4 by inline PTX, where there is a device to run it.
    """

    warps: int
    stages: int
    shared_stages: int = 4
    ptx: bool = True


class ExpertOutputs(NamedTuple):
    """down_out [R * k, H] in the activations' dtype, unweighted; shared_out [R, H] float32."""

    down_out: Tensor
    shared_out: Tensor | None


def expert_mlp(x: Tensor, routing: Routing, packed: PackedExperts) -> ExpertOutputs:
    """x [R, H] through the experts that `routing` names, and the shared expert's down product.

    Two launches. A row's results do not depend on the other rows.
    """
    tokens = routing.blocks.slots.shape[1]
    split = split_up(x.shape[0] * routing.experts.shape[1], packed, x.device)
    inner = _launch_up(x, routing, packed, split, tuning(packed.up, tokens))
    return _launch_down(inner, x, routing, packed, tuning(packed.down, tokens, parts=split))


def split_up(slots: int, packed: PackedExperts, device: torch.device) -> bool:
    """Whether up's segments are programs of their own: where else the device would not be full."""
    programs = slots * packed.up.weight.shape[1]
    return packed.segments > 1 and programs < multiprocessors(device)


def tuning(weight: TiledWeight, tokens: int, parts: bool = False) -> Tuning:
    """Warps and stages for blocks of `tokens` slots: 64 weight rows a warp while they are narrow.

    Wide blocks need the registers of more warps, and the shared memory of their tokens. A stage of
    `parts` holds 32 KB of float32: more than two would leave one block an SM, and none on sm_120.
    """
    warps = max(1, weight.tile_rows // 64)
    if tokens <= 16:
        return Tuning(warps, 2 if parts else 4)
    if tokens == 32:
        return Tuning(max(4, warps), 3)
    return Tuning(max(8, warps), 2)


def _weight_options(weight: TiledWeight, x: Tensor, how: Tuning) -> dict[str, Any]:
    return {
        "TILES": weight.weight.shape[1],
        "BLOCKS": weight.weight.shape[2],
        "QUANTISED": weight.scale is not None,
        "PTX": x.device.type != "cpu" and how.ptx,  # the interpreter has none
        "PRECISE": precise(x),
        "N": weight.tile_rows,
        "STAGES": how.stages,
        "num_warps": how.warps,
    }


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
    }[dtype]


def _check_blocks(blocks: Blocks) -> None:
    assert blocks.expert.dtype == blocks.slots.dtype == torch.int32, f"{blocks.expert.dtype}"
    assert blocks.slots.is_contiguous() and len(blocks.expert) == len(blocks.slots)


def _launch_up(
    x: Tensor, routing: Routing, packed: PackedExperts, split: bool, how: Tuning
) -> Tensor:
    """h [R k, I] in x's dtype, or if `split` the parts [S, R k, 2 I] float32 that down adds up."""
    from kdtree_engine.kernels.experts.kernel import experts_up

    blocks, weight = routing.blocks, packed.up
    _check_blocks(blocks)
    slots, top_k = routing.experts.numel(), routing.experts.shape[1]
    assert x.is_contiguous() and list(x.shape) == [slots // top_k, packed.hidden], f"{x.shape}"
    assert weight.scale is not None or weight.weight.dtype == x.dtype, f"{x.dtype}"
    inner, segments = packed.inner, packed.segments
    if split:
        out = torch.empty(segments, slots, 2 * inner, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(slots, inner, dtype=x.dtype, device=x.device)
    grid = (weight.weight.shape[1], len(blocks.expert), segments if split else 1)
    experts_up[grid](
        x, weight.weight, weight.scale, blocks.expert, blocks.slots, out, slots,
        HIDDEN=packed.hidden, INNER=inner, TOP_K=top_k,
        SEGMENT=-(-weight.weight.shape[2] // segments), SPLIT=split, DTYPE=_triton_dtype(x.dtype),
        T=blocks.slots.shape[1], **_weight_options(weight, x, how), **launch_options(x),
    )  # fmt: skip
    return out


def _launch_down(
    inner: Tensor, x: Tensor, routing: Routing, packed: PackedExperts, how: Tuning
) -> ExpertOutputs:
    """`inner`: h or parts, as _launch_up returned it; x: the activations, for dtype and rows."""
    from kdtree_engine.kernels.experts.kernel import experts_down

    blocks, weight, shared = routing.blocks, packed.down, packed.shared_down
    slots, rows, tokens = routing.experts.numel(), x.shape[0], blocks.slots.shape[1]
    assert (shared is None) == (routing.shared is None), "shared values without shared weights"
    out = torch.empty(slots, packed.hidden, dtype=x.dtype, device=x.device)
    shared_out, shared_blocks, shared_inner = None, 0, 0
    if shared is not None and routing.shared is not None:
        assert shared.tile_rows == weight.tile_rows, "tiles of different heights"
        assert list(routing.shared.shape) == [rows, shared.columns], f"{routing.shared.shape}"
        assert routing.shared.dtype == shared.weight.dtype == x.dtype, f"{x.dtype}"
        shared_out = torch.empty(rows, packed.hidden, dtype=torch.float32, device=x.device)
        shared_blocks, shared_inner = -(-rows // tokens), shared.columns
    experts_down[(weight.weight.shape[1], shared_blocks + len(blocks.expert))](
        inner, weight.weight, weight.scale, blocks.expert, blocks.slots, out, slots,
        routing.shared, None if shared is None else shared.weight, shared_out, rows,
        HIDDEN=packed.hidden, INNER=packed.inner, SHARED_INNER=shared_inner,
        PARTS=inner.shape[0] if inner.ndim == 3 else 0, DTYPE=_triton_dtype(x.dtype),
        T=tokens, SHARED_STAGES=how.shared_stages, **_weight_options(weight, x, how),
        **launch_options(x),
    )  # fmt: skip
    return ExpertOutputs(out, shared_out)


def combine_add_norm(
    down_out: Tensor,
    weights: Tensor,
    shared_out: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Weigh and add the experts' outputs, add the residual, and norm for the next layer.

    down_out [R * k, H], weights [R, k] float32, shared_out [R, H] float32 or None, residual [R, H],
    norm_weight [H] -> (x_new [R, H], normed [R, H]) in residual's dtype. All in float32 with one
    rounding to x_new; the norm is of the rounded x_new. One launch, one program a row.
    """
    from triton import next_power_of_2

    from kdtree_engine.kernels.experts.kernel import combine_kernel

    (rows, top_k), hidden = weights.shape, residual.shape[1]
    assert list(down_out.shape) == [rows * top_k, hidden], f"{down_out.shape}"
    assert residual.shape[0] == rows and norm_weight.shape == (hidden,), f"{residual.shape}"
    assert weights.dtype == torch.float32 and residual.dtype == norm_weight.dtype
    assert shared_out is None or shared_out.dtype == torch.float32
    tensors = (down_out, weights, shared_out, residual)
    assert all(t.is_contiguous() for t in tensors if t is not None)
    x_new, normed = torch.empty_like(residual), torch.empty_like(residual)
    combine_kernel[(rows,)](
        down_out, weights, shared_out, residual, norm_weight, x_new, normed, eps, HIDDEN=hidden,
        TOP_K=top_k, SHARED=shared_out is not None, P=next_power_of_2(hidden),
        num_warps=NORM_WARPS, **launch_options(residual),
    )  # fmt: skip
    return x_new, normed


__all__ = [
    "ExpertOutputs",
    "ExpertWeights",
    "PackedExperts",
    "TiledWeight",
    "Tuning",
    "combine_add_norm",
    "expert_mlp",
    "pack_experts",
    "random_packed_experts",
    "routed_experts",
]
