"""Dense product of rows with one weight.

Two stored forms. ColumnBlocks [blocks, K, columns] turn the product into a batched one: on the CPU
that is row-exact from few rows on and about twice as fast as one wide product, which packs its
weights anew at every call (docs/log.md); training uses them on any device. PackedLinear is the
form that kernels read, and it may hold FP8 values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import launch_options, precise
from kdtree_engine.kernels.linear import reference
from kdtree_engine.kernels.linear.packed import (
    TILE,
    PackedLinear,
    Parts,
    Weight,
    pack_linear,
    packed_linear_bytes,
    random_linear,
    whole_weight,
)
from kdtree_engine.kernels.linear.reference import ColumnBlocks, pack_columns

DenseWeight = ColumnBlocks | PackedLinear


class Tiles(NamedTuple):
    """Launch constants of one product; they change its speed, never its bits.

    ptx: convert FP8 by inline PTX, where there is a device to run it.
    """

    block_n: int
    block_t: int
    block_k: int
    warps: int
    stages: int
    split: bool
    ptx: bool = True


def pack_weight(
    weight: Parts, dtype: torch.dtype, device: torch.device | str, kernels: bool
) -> DenseWeight:
    """A checkpoint's weight [out, in], or several, one below the other.

    For kernels, FP8 weights may stay so (`pack_linear`); for the reference they are made dense.
    """
    if kernels:
        return pack_linear(weight, dtype, device)
    return pack_columns(whole_weight(weight, dtype, device), dtype, device)


def linear(x: Tensor, weight: DenseWeight, dtype: torch.dtype | None = None) -> Tensor:
    """x [R, K] times the weight, [R, columns] in `dtype` (x's); rows do not affect each other."""
    if isinstance(weight, ColumnBlocks):
        return reference.linear(x, weight).to(dtype or x.dtype)
    return add_parts(product(x, weight), weight.columns, dtype or x.dtype)


def product(x: Tensor, weight: DenseWeight) -> Tensor:
    """The same before its last additions, for an operator that reads the sum once and can do them.

    ColumnBlocks: [R, columns] in x's dtype. PackedLinear: parts [S, R, width] float32, to be added
    in order; columns beyond the weight's are zeros.
    """
    if isinstance(weight, ColumnBlocks):
        return reference.linear(x, weight)
    assert x.ndim == 2 and x.shape[1] == weight.depth, f"{list(x.shape)} times {weight.depth}"
    assert x.dtype == weight.dtype, f"{x.dtype} rows, {weight.dtype} weights"
    # With gradients on, operators without a weight would take references, whose bits are others.
    assert not (x.is_cuda and torch.is_grad_enabled()), "kernels need torch.inference_mode()"
    return _launch_parts(x, weight, choose_tiles(x.shape[0], weight))


def choose_tiles(rows: int, weight: PackedLinear) -> Tiles:
    """Launch constants by the number of rows, from benches/kernels.py on an H200.

    None needs more shared memory than sm_120 has.
    """
    count, blocks = weight.tiles.shape[:2]
    half = weight.dtype.itemsize == 2
    narrow = max(8, 1 << (rows - 1).bit_length())
    if rows <= 8 and weight.scales is not None:
        # Converting keeps a warp busy for longer than a tile takes to arrive, so there are four: a
        # row of K2's qkv_a takes 8.2 us (reading it 3.6), within 5% of the best of 19 tried.
        return Tiles(64, narrow, 128 if half and blocks % 2 == 0 else 64, 4, 6, True)
    if rows <= 8:
        return Tiles(64, narrow, 64, 1, 6, True)
    if rows <= 64:
        block_k = 128 if half and blocks % 2 == 0 else 64
        return Tiles(64, narrow, block_k, 4, 4 if narrow < 64 else 3, True)
    if rows <= 256:
        return Tiles(64, 64, 64, 4, 4 if half else 3, count < 64)
    return Tiles(64, 128, 64, 4, 4 if half else 2, False)


def _launch_parts(x: Tensor, weight: PackedLinear, tiles: Tiles) -> Tensor:
    from kdtree_engine.kernels.linear.kernel import linear_parts

    rows = x.shape[0]
    x = x.contiguous()
    parts = weight.segments if tiles.split else 1
    out = torch.empty(parts, rows, weight.width, dtype=torch.float32, device=x.device)
    grid = (weight.width // tiles.block_n, parts, -(-rows // tiles.block_t))
    quantised = weight.scales is not None
    linear_parts[grid](
        x, weight.tiles, weight.scales, out, rows, weight.depth, weight.tiles.shape[1],
        weight.segment, weight.segments, weight.width, FP8=quantised,
        PTX=quantised and tiles.ptx and x.device.type != "cpu",  # the interpreter has none
        SPLIT=tiles.split and weight.segments > 1, BLOCK_N=tiles.block_n, BLOCK_T=tiles.block_t,
        BLOCK_K=tiles.block_k, STAGES=tiles.stages, PRECISE=precise(x),
        num_warps=tiles.warps, **launch_options(x),
    )  # fmt: skip
    return out


def add_parts(parts: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The sum of parts [S, R, width] in order, its first `columns` columns, [R, columns]."""
    if parts.shape[0] == 1 and dtype == parts.dtype:
        return parts[0, :, :columns]
    from kdtree_engine.kernels.linear.kernel import sum_parts

    count, rows, width = parts.shape
    out = torch.empty(rows, columns, dtype=dtype, device=parts.device)
    block = 1024
    sum_parts[(rows, -(-columns // block))](
        parts, out, rows, columns, width, count, block, num_warps=4, **launch_options(parts)
    )
    return out


__all__ = [
    "TILE",
    "ColumnBlocks",
    "DenseWeight",
    "PackedLinear",
    "Parts",
    "Tiles",
    "Weight",
    "add_parts",
    "choose_tiles",
    "linear",
    "pack_columns",
    "pack_linear",
    "pack_weight",
    "packed_linear_bytes",
    "product",
    "random_linear",
]
