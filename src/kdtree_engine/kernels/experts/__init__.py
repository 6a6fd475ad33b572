"""Routed experts: each row through its own few gated MLPs, added in the router's order.

`routed_experts` is the CPU's operator. On a device three launches do the same: `expert_mlp` (up,
then down with the shared expert) and `combine_add_norm`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.experts.packing import (
    ExpertWeight,
    PackedExperts,
    TiledWeight,
    pack_experts,
    packed_experts_bytes,
    random_packed_experts,
)
from kdtree_engine.kernels.experts.reference import ExpertWeights, routed_experts
from kdtree_engine.kernels.launch import launch_options, precise
from kdtree_engine.kernels.router import Blocks, Routing

NORM_WARPS = 16
"""Warps of a row's combination, at any number of rows: the sum in its norm depends on them."""


class UpTuning(NamedTuple):
    """How up is launched; no result depends on it.

    rows: of a stored tile, a program. joint: all segments side by side, a warp each (`warps` is not
    read then). stages: blocks of weights in flight, and one. ptx: unpack INT4 or FP8 by inline PTX,
    where there is a device to run it.
    """

    rows: int
    warps: int
    stages: int
    joint: bool = False
    ptx: bool = True


class DownTuning(NamedTuple):
    """The same of down. shared_*: the shared expert's programs.

    pieces: times `rows` that a program takes.
    """

    rows: int
    warps: int
    stages: int
    pieces: int = 1
    shared_rows: int = 32
    shared_tokens: int = 8
    shared_stages: int = 5
    ptx: bool = True


class ExpertOutputs(NamedTuple):
    """down_out [R * k, H] in the activations' dtype, unweighted; shared_out [R, H] float32."""

    down_out: Tensor
    shared_out: Tensor | None


def expert_mlp(x: Tensor, routing: Routing, packed: PackedExperts) -> ExpertOutputs:
    """x [R, H] through the experts that `routing` names, and the shared expert's down product.

    Two launches. A row's results do not depend on the other rows.
    """
    slots, tokens = routing.experts.numel(), routing.blocks.slots.shape[1]
    inner = _launch_up(x, routing, packed, up_tuning(packed, slots, tokens, x))
    return _launch_down(inner, x, routing, packed, down_tuning(packed, len(x), slots, tokens))


def up_tuning(packed: PackedExperts, slots: int, tokens: int, x: Tensor) -> UpTuning:
    """For `slots` choices in blocks of `tokens`, from benches/kernels.py on an H200.

    Few blocks take all segments at once; many run one warp for 64 rows of weights; wide blocks need
    the registers of more warps, and the shared memory of their tokens.
    """
    height = packed.up.tile_rows
    if tokens == 8 and slots < 128 and packed.segments > 1 and not precise(x):
        rows, stages = (32, 4) if slots <= 32 else (64, 3)
        return UpTuning(min(height, rows), 0, stages, joint=True)
    if tokens == 8 and 192 <= slots <= 384:
        return UpTuning(height, max(1, height // 64), 4)
    if tokens == 8:
        return UpTuning(min(height, 64), 1, 5 if slots <= 128 else 4)
    warps, stages = _wide(height, tokens)
    return UpTuning(height, warps, stages)


def down_tuning(packed: PackedExperts, rows: int, slots: int, tokens: int) -> DownTuning:
    """The same for down; the more programs there are, the more each takes.

    The shared expert's weights are read from the L2 again for every `shared_tokens` rows.
    """
    height = packed.down.tile_rows
    shared = min(height, 32), max(tokens, min(64, 1 << (rows - 1).bit_length()))
    if tokens == 8 and slots <= 32:
        return DownTuning(min(height, 64), 1, 3, 1, *shared)
    if tokens == 8:
        return DownTuning(height, max(1, height // 64), 3, 1 if slots <= 128 else 4, *shared)
    warps, stages = _wide(height, tokens)
    if tokens == 16:
        return DownTuning(height, warps, 3, 4, *shared, 3)
    return DownTuning(height, warps, stages, 1, *shared, 3)


def _wide(height: int, tokens: int) -> tuple[int, int]:
    """Warps and stages for blocks of more than 8 tokens."""
    warps = max(1, height // 64)
    if tokens == 16:
        return warps, 4
    return (max(4, warps), 3) if tokens == 32 else (max(8, warps), 2)


def _weight_options(weight: TiledWeight, x: Tensor, how: UpTuning | DownTuning) -> dict[str, Any]:
    return {
        "TILES": weight.weight.shape[1],
        "BLOCKS": weight.weight.shape[2],
        "PLANES": weight.planes,
        "PTX": x.device.type != "cpu" and how.ptx,  # the interpreter has none
        "PRECISE": precise(x),
        "N": how.rows,
        "TILE": weight.tile_rows,
        "STAGES": how.stages,
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


def _launch_up(x: Tensor, routing: Routing, packed: PackedExperts, how: UpTuning) -> Tensor:
    """h [R k, I] in x's dtype."""
    from kdtree_engine.kernels.experts.kernel import experts_up

    blocks, weight = routing.blocks, packed.up
    _check_blocks(blocks)
    slots, top_k = routing.experts.numel(), routing.experts.shape[1]
    assert x.is_contiguous() and list(x.shape) == [slots // top_k, packed.hidden], f"{x.shape}"
    assert weight.scale is not None or weight.weight.dtype == x.dtype, f"{x.dtype}"
    assert how.rows % 16 == 0 and weight.tile_rows % how.rows == 0, f"{how.rows} rows"
    out = torch.empty(slots, packed.inner, dtype=x.dtype, device=x.device)
    grid = (weight.weight.shape[1] * (weight.tile_rows // how.rows), len(blocks.expert))
    experts_up[grid](
        x, weight.weight, weight.scale, blocks.expert, blocks.slots, out, slots,
        HIDDEN=packed.hidden, INNER=packed.inner, TOP_K=top_k, S=packed.segments, JOINT=how.joint,
        DTYPE=_triton_dtype(x.dtype), T=blocks.slots.shape[1],
        num_warps=packed.segments if how.joint else how.warps, **_weight_options(weight, x, how),
        **launch_options(x),
    )  # fmt: skip
    return out


def _launch_down(
    inner: Tensor, x: Tensor, routing: Routing, packed: PackedExperts, how: DownTuning
) -> ExpertOutputs:
    """`inner`: h, as _launch_up returned it; x: the activations, for dtype and rows."""
    from kdtree_engine.kernels.experts.kernel import experts_down

    blocks, weight, shared = routing.blocks, packed.down, packed.shared_down
    slots, rows, tokens = routing.experts.numel(), x.shape[0], blocks.slots.shape[1]
    assert (shared is None) == (routing.shared is None), "shared values without shared weights"
    out = torch.empty(slots, packed.hidden, dtype=x.dtype, device=x.device)
    assert weight.tile_rows % how.rows == 0, f"{how.rows} rows"
    shared_out, shared_programs, shared_inner = None, 0, 0
    if shared is not None and routing.shared is not None:
        assert shared.tile_rows == weight.tile_rows, "tiles of different heights"
        assert list(routing.shared.shape) == [rows, shared.columns], f"{routing.shared.shape}"
        assert routing.shared.dtype == shared.weight.dtype == x.dtype, f"{x.dtype}"
        assert shared.tile_rows % how.shared_rows == 0, f"{how.shared_rows} rows"
        shared_out = torch.empty(rows, packed.hidden, dtype=torch.float32, device=x.device)
        parts = shared.weight.shape[1] * (shared.tile_rows // how.shared_rows)
        shared_programs, shared_inner = -(-rows // how.shared_tokens) * parts, shared.columns
    parts = weight.weight.shape[1] * (weight.tile_rows // how.rows)
    experts_down[(shared_programs + len(blocks.expert) * -(-parts // how.pieces),)](
        inner, weight.weight, weight.scale, blocks.expert, blocks.slots, out, slots,
        routing.shared, None if shared is None else shared.weight, shared_out, rows,
        HIDDEN=packed.hidden, INNER=packed.inner, SHARED_INNER=shared_inner,
        DTYPE=_triton_dtype(x.dtype), T=tokens, PIECES=how.pieces,
        SHARED_N=how.shared_rows, SHARED_T=how.shared_tokens,
        SHARED_STAGES=how.shared_stages, num_warps=how.warps, **_weight_options(weight, x, how),
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
    warps: int = NORM_WARPS,
) -> tuple[Tensor, Tensor]:
    """Weigh and add the experts' outputs, add the residual, and norm for the next layer.

    down_out [R * k, H], weights [R, k] float32, shared_out [R, H] float32 or None, residual [R, H],
    norm_weight [H] -> (x_new [R, H], normed [R, H]) in residual's dtype. All in float32 with one
    rounding to x_new; the norm is of the rounded x_new. One launch, one program a row.
    `warps` is for timing: the norm's sum depends on it.
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
        num_warps=warps, **launch_options(residual),
    )  # fmt: skip
    return x_new, normed


__all__ = [
    "DownTuning",
    "ExpertOutputs",
    "ExpertWeight",
    "ExpertWeights",
    "PackedExperts",
    "TiledWeight",
    "UpTuning",
    "combine_add_norm",
    "expert_mlp",
    "pack_experts",
    "packed_experts_bytes",
    "random_packed_experts",
    "routed_experts",
]
