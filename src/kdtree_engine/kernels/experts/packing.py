"""Expert weights as the kernels read them: tiles of rows, each one contiguous run of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kdtree_engine.kernels import fp8, int4
from kdtree_engine.kernels.fp8 import Fp8Tensor
from kdtree_engine.kernels.fp8.words import (
    STEP,
    dense,
    on_device,
    random_scales,
    random_words,
    values_of,
    words_of,
)
from kdtree_engine.kernels.int4 import Int4Tensor

UP_ROWS = 128
DOWN_ROWS = 128
"""Weight rows of a stored tile, up (gates and ups together) and down; a program may take fewer."""

PAIR = 8
"""Gates that stand together in an up tile, before as many ups."""

SEGMENTS = 4
"""The most pieces that the up product's K is cut into; results depend on it."""

_BLOCK = 128  # inputs of an INT4 block
_GROUP = int4.GROUP


@dataclass(frozen=True, eq=False)
class TiledWeight:
    """Weights [E, rows, columns] in tiles of N rows.

    INT4: `weight` [E, tiles, columns / 128, N, 32] int16 and `scale` [E, tiles, columns / 32, N]
    bf16. FP8: `weight` [E, tiles, columns / 64, N, 32] int16 (`words_of`) and `scale`
    [E, tiles, columns / 64, N / 8] float32. Dense: `weight` [E, tiles, columns / 32, N, 32] and no
    scale. Rows and columns are filled up with zeros.
    """

    weight: Tensor
    scale: Tensor | None
    rows: int
    columns: int

    @property
    def tile_rows(self) -> int:
        """N."""
        return self.weight.shape[3]

    @property
    def planes(self) -> int:
        """Inputs that lie in one element of `weight`: 4 INT4, 2 FP8, or 1."""
        if self.scale is None:
            return 1
        return 2 if self.scale.dtype == torch.float32 else 4


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """One layer's experts for the device.

    up: [E, 2 I, H] with gates and ups interleaved in the tiles; down: [E, H, I]; shared_down:
    [1, H, Is] dense, where there is a shared expert. segments: pieces of the up product's K,
    a constant of the weight's shape.
    """

    up: TiledWeight
    down: TiledWeight
    shared_down: TiledWeight | None
    segments: int

    @property
    def inner(self) -> int:
        """I, of this rank."""
        return self.down.columns

    @property
    def hidden(self) -> int:
        """H."""
        return self.up.columns


ExpertWeight = Int4Tensor | Fp8Tensor | Tensor
ExpertPair = tuple[ExpertWeight, ExpertWeight]
"""One expert: gate over up [2 I, H], and down [H, I]."""


def segments_of(columns: int) -> int:
    """Pieces that `columns` inputs are added up in: a power of two, none much below 512 inputs."""
    return 1 << (min(SEGMENTS, max(1, columns // 512)).bit_length() - 1)


def pack_experts(
    experts: Iterable[ExpertPair],
    count: int,
    shared_down: Tensor | Fp8Tensor | None,
    dtype: torch.dtype,
    device: torch.device | str,
    up_rows: int = UP_ROWS,
    down_rows: int = DOWN_ROWS,
) -> PackedExperts:
    """`count` experts, taken one at a time into tensors of their final size.

    All are Int4Tensors, all Fp8Tensors or all dense [out, in] tensors; dense ones and the shared
    expert's down [H, Is] become `dtype`, the activations'. Blocks of an FP8 gate over up count from
    the gate's first row (`joined`); I is a multiple of 8 then. Extra memory: one expert in flight.
    """
    up = down = None
    index = -1
    for index, (gate_up, own_down) in enumerate(experts):
        if up is None or down is None:
            up = _empty(gate_up, count, up_rows, dtype, device, interleaved=True)
            down = _empty(own_down, count, down_rows, dtype, device, interleaved=False)
        _fill(up, index, _on(gate_up, device, dtype), interleaved=True)
        _fill(down, index, _on(own_down, device, dtype), interleaved=False)
    assert up is not None and down is not None and index + 1 == count, f"{index + 1} of {count}"
    assert up.rows == 2 * down.columns and up.columns == down.rows, f"{up.rows} {down.columns}"
    shared = None
    if shared_down is not None:
        whole = dense(shared_down, dtype, device)
        assert whole.shape[0] == down.rows, f"{whole.shape}"
        shared = _empty(whole, 1, down_rows, dtype, device, interleaved=False)
        _fill(shared, 0, whole, interleaved=False)
    return PackedExperts(up, down, shared, segments_of(up.columns))


def packed_experts_bytes(
    gate_up: ExpertWeight,
    down: ExpertWeight,
    shared_down: Tensor | None,
    count: int,
    dtype: torch.dtype,
) -> int:
    """What `pack_experts` takes for `count` experts of such a pair; on "meta" nothing is taken."""
    made = [
        _empty(gate_up, count, UP_ROWS, dtype, "meta", interleaved=True),
        _empty(down, count, DOWN_ROWS, dtype, "meta", interleaved=False),
    ]
    if shared_down is not None:
        made.append(_empty(shared_down, 1, DOWN_ROWS, dtype, "meta", interleaved=False))
    return sum(one.weight.nbytes + (0 if one.scale is None else one.scale.nbytes) for one in made)


def random_packed_experts(
    experts: int,
    hidden: int,
    inner: int,
    shared_inner: int,
    device: torch.device | str,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.bfloat16,
    up_rows: int = UP_ROWS,
    down_rows: int = DOWN_ROWS,
    planes: int = 4,
) -> PackedExperts:
    """INT4 experts of random words, made where they lie: a layer of K2.6 in milliseconds.

    Scales are uniform in [-0.01, 0.01), so a weight's standard deviation is about 0.027 and its
    mean zero: a nibble's is -1/2, which over some layers would make all rows alike. Widths are
    multiples of 128, as filled-up places would not be zero. `generator` is the device's. With two
    `planes` they are FP8 of the same spread.
    """
    assert hidden % _BLOCK == 0 and inner % _BLOCK == 0, f"{hidden}, {inner}"
    assert shared_inner % _GROUP == 0 and hidden % down_rows == 0, f"{shared_inner}, {hidden}"
    assert 2 * inner % up_rows == 0, f"{inner}"
    assert planes in (2, 4), f"{planes} planes"

    def tiled(rows: int, columns: int, tile: int) -> TiledWeight:
        tiles = experts, rows // tile
        if planes == 2:
            weight = random_words((*tiles, columns // STEP, tile, 32), device, generator)
            shape = *tiles, columns // STEP, tile // PAIR
            scale = random_scales(shape, 0.027, device, generator)
            return TiledWeight(weight, scale, rows, columns)
        weight = torch.empty(*tiles, columns // _BLOCK, tile, 32, dtype=torch.int16, device=device)
        weight.random_(-(2**15), 2**15, generator=generator)
        scale = torch.empty(*tiles, columns // _GROUP, tile, dtype=torch.bfloat16, device=device)
        return TiledWeight(weight, scale.uniform_(-0.01, 0.01, generator=generator), rows, columns)

    shared = None
    if shared_inner:
        shape = (1, hidden // down_rows, shared_inner // 32, down_rows, 32)
        weight = torch.empty(shape, dtype=dtype, device=device)
        shared = TiledWeight(
            weight.normal_(0, 0.02, generator=generator), None, hidden, shared_inner
        )
    up, down = tiled(2 * inner, hidden, up_rows), tiled(hidden, inner, down_rows)
    return PackedExperts(up, down, shared, segments_of(hidden))


def unpack_expert(
    tiled: TiledWeight, expert: int, interleaved: bool, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The weight [rows, columns] of one expert that the tiles stand for: INT4 in bf16, FP8 rounded
    to `dtype`, the activations'.

    `interleaved`: an up weight; gates come first again. For tests and the bench's reference.
    """
    weight = tiled.weight[expert]
    tiles, blocks, tile_rows, _ = weight.shape
    if tiled.scale is None:
        values = weight.permute(0, 2, 1, 3)
    elif tiled.planes == 2:
        scale = tiled.scale[expert].repeat_interleave(PAIR, 2).unsqueeze(-1)
        values = (values_of(weight).float() * scale).to(dtype).permute(0, 2, 1, 3)
    else:
        shifts = torch.arange(0, 16, 4, device=weight.device, dtype=torch.int32)
        q = ((weight.int().unsqueeze(-2) >> shifts[:, None]) & 15) - 8  # [tiles, blocks, N, 4, 32]
        scale = tiled.scale[expert].view(tiles, blocks, 4, tile_rows).transpose(2, 3)
        values = (q.float() * scale.float().unsqueeze(-1)).bfloat16().permute(0, 2, 1, 3, 4)
    rows = values.reshape(tiles * tile_rows, -1)[:, : tiled.columns]
    if interleaved:
        rows = rows.view(-1, 2, PAIR, rows.shape[1]).transpose(0, 1)
        rows = rows.reshape(2, -1, rows.shape[-1])[:, : tiled.rows // 2].flatten(0, 1)
    return rows[: tiled.rows]


def _on(weight: ExpertWeight, device: torch.device | str, dtype: torch.dtype) -> ExpertWeight:
    if isinstance(weight, Int4Tensor):
        return Int4Tensor(weight.packed.to(device), weight.scale.to(device))
    if isinstance(weight, Fp8Tensor):
        return on_device(weight, device)
    return weight.to(device, dtype)


def _empty(
    like: ExpertWeight,
    experts: int,
    tile_rows: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    interleaved: bool,
) -> TiledWeight:
    """Room for `experts` weights of the kind and shape of `like`."""
    rows, columns = like.shape
    assert tile_rows % (2 * PAIR) == 0, f"{tile_rows} rows of a tile"
    filled = _pairs(rows) * 2 * PAIR if interleaved else rows
    tiles = experts, -(-filled // tile_rows)

    def room(dtype: torch.dtype, *tile: int) -> Tensor:
        return torch.empty((*tiles, *tile), dtype=dtype, device=device)

    if isinstance(like, Int4Tensor):
        blocks = -(-columns // _BLOCK)
        words = room(torch.int16, blocks, tile_rows, 32)
        scales = room(torch.bfloat16, blocks * (_BLOCK // _GROUP), tile_rows)
        return TiledWeight(words, scales, rows, columns)
    if isinstance(like, Fp8Tensor):
        blocks = -(-columns // STEP)
        words = room(torch.int16, blocks, tile_rows, 32)
        scales = room(torch.float32, blocks, tile_rows // PAIR)
        return TiledWeight(words, scales, rows, columns)
    return TiledWeight(room(dtype, -(-columns // 32), tile_rows, 32), None, rows, columns)


def _pairs(rows: int) -> int:
    """Runs of PAIR gates and PAIR ups that hold `rows` of both."""
    assert rows % 2 == 0, f"{rows} rows are no gates and ups"
    return -(-rows // (2 * PAIR))


def _fill(tiled: TiledWeight, expert: int, weight: ExpertWeight, *, interleaved: bool) -> None:
    """Write one expert's [rows, columns] into its tiles."""
    assert tuple(weight.shape) == (tiled.rows, tiled.columns), f"{weight.shape}"
    tiles, blocks, tile_rows, _ = tiled.weight.shape[1:]

    def rows_of(values: Tensor, fill: float, pair: int = PAIR) -> Tensor:
        """In the tiles' order; of every PAIR-th row if `pair` is 1."""
        each = PAIR // pair
        if interleaved:
            half = tiled.rows // 2 // each
            room = _pairs(tiled.rows) * pair - half
            both = pad(values.view(2, half, -1), (0, 0, 0, room), value=fill)
            values = both.view(2, -1, pair, both.shape[-1]).transpose(0, 1).flatten(0, 2)
        return pad(values, (0, 0, 0, tiles * tile_rows // each - values.shape[0]), value=fill)

    planes = 4 if isinstance(weight, Int4Tensor) else 2 if isinstance(weight, Fp8Tensor) else 1
    assert planes == tiled.planes, "experts of different kinds"
    if isinstance(weight, Int4Tensor):
        nibbles = int4.unpack(weight.packed) + 8
        nibbles = rows_of(pad(nibbles, (0, blocks * _BLOCK - tiled.columns), value=8), 8)
        by_plane = nibbles.view(tiles, tile_rows, blocks, 4, 32).to(torch.int16)
        words = by_plane[..., 0, :].clone()
        for j in range(1, 4):
            words |= by_plane[..., j, :] << (4 * j)
        groups = blocks * (_BLOCK // _GROUP)
        scale = rows_of(pad(weight.scale, (0, groups - weight.scale.shape[1])), 0.0)
        _put(tiled, expert, words, scale.view(tiles, tile_rows, groups))
    elif isinstance(weight, Fp8Tensor):
        eighths = not interleaved or tiled.rows % (2 * PAIR) == 0
        assert eighths, f"{tiled.rows // 2} FP8 gates do not fill groups of {PAIR}"
        held = weight.values.view(torch.uint8)
        held = rows_of(pad(held, (0, blocks * STEP - tiled.columns)), 0)
        scale = rows_of(_scales_of_eight(weight, blocks), 0.0, 1)
        words = words_of(held.view(tiles, tile_rows, blocks, STEP))
        _put(tiled, expert, words, scale.view(tiles, tile_rows // PAIR, blocks))
    else:
        values = rows_of(pad(weight, (0, blocks * 32 - tiled.columns)), 0.0)
        tiled.weight[expert] = values.view(tiles, tile_rows, blocks, 32).transpose(1, 2)


def _put(tiled: TiledWeight, expert: int, words: Tensor, scale: Tensor) -> None:
    """words [tiles, N, blocks, 32] and scales [tiles, of rows, of columns]."""
    assert tiled.scale is not None
    tiled.weight[expert] = words.transpose(1, 2)
    tiled.scale[expert] = scale.transpose(1, 2)


def _scales_of_eight(weight: Fp8Tensor, blocks: int) -> Tensor:
    """[rows / 8, blocks]: the scales of eight rows and of 64 inputs, zeros beyond the last."""
    rows = -(-weight.shape[0] // PAIR)
    by_row = weight.scales.repeat_interleave(fp8.BLOCK // PAIR, 0)[:rows]
    return by_row.repeat_interleave(fp8.BLOCK // STEP, 1)[:, :blocks]
