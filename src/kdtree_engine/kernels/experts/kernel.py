"""Routed experts over blocks of choices, the shared expert's down product, and their combination.

    up        h [R k, I]      = silu(gate_e x_row) * (up_e x_row)       for slot = row * k + choice
    down      d [R k, H]      = down_e h;   shared [R, H] = shared_down shared_h, in the same launch
    combine   y               = sum over k in order of fma(w_k, d_k, y), then + shared
              x_new [R, H]    = dtype(residual + y)
              normed [R, H]   = dtype(x_new / sqrt(mean(x_new^2) + eps)) * norm_weight

Weights lie in tiles of N rows, and a tile's blocks of STEP inputs follow each other in memory:

    INT4    words [E, tiles, K / 128, N, 32] int16, scales [E, tiles, K / 32, N] bf16, STEP = 128;
            nibble j of word i of a row is q + 8 of input 32 j + i, so a nibble plane has one scale.
            The weight is bf16(q * scale), the checkpoint's value.
    dense   weights [E, tiles, K / 32, N, 32], STEP = 32

In an up tile rows 16 i .. 16 i + 7 are gates and the next eight their ups: a thread of the MMA
holds rows r and r + 8 of sixteen, so it has both. The weights are the MMA's M operand, a block's
tokens its N side.

up cuts K into segments of SEGMENT blocks, each with an accumulator of its own, added in order.
SPLIT runs a program for each and leaves float32 parts [S, R k, 2 I] (gates, then ups) that down
adds in the same order; otherwise one program runs all of them. The bits are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin, product


@triton.jit
def unpack_ptx(words):
    """int16 words to their four planes of bf16 q; two words lie in one register.

    A nibble OR-ed into the mantissa of bf16 128 is 128 + q + 8, and subtracting 136 is exact.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, m, o, b;
        mov.b32 m, 0x000f000f;
        mov.b32 o, 0x43004300;
        mov.b32 b, 0x43084308;
        lop3.b32 t, $4, m, o, 0xEA;
        sub.bf16x2 $0, t, b;
        shr.u32 t, $4, 4;
        lop3.b32 t, t, m, o, 0xEA;
        sub.bf16x2 $1, t, b;
        shr.u32 t, $4, 8;
        lop3.b32 t, t, m, o, 0xEA;
        sub.bf16x2 $2, t, b;
        shr.u32 t, $4, 12;
        lop3.b32 t, t, m, o, 0xEA;
        sub.bf16x2 $3, t, b;
        }
        """,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def plane(words, scale, J: tl.constexpr, DTYPE: tl.constexpr):
    """bf16(q * scale) of nibble plane J, in DTYPE: what unpack_ptx's plane times the scale is.

    Rounded by hand, to nearest and ties to even: the interpreter's own bfloat16 cuts the bits off.
    """
    q = ((words >> (4 * J)) & 15).to(tl.float32) - 8.0
    bits = (q * scale.to(tl.float32)).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in float32."""
    return gate / (tl.exp(-gate) + 1.0) * up


@triton.jit
def operand(x, mask, parts_stride, PARTS: tl.constexpr, INNER: tl.constexpr, DTYPE: tl.constexpr):
    """The tokens' values at pointers x; with PARTS, x points to up's gates: add and gate them."""
    if PARTS == 0:
        value = tl.load(x, mask=mask, other=0.0)
    else:
        gate = tl.zeros(mask.shape, tl.float32)
        up = tl.zeros(mask.shape, tl.float32)
        for part in tl.static_range(PARTS):
            gate += tl.load(x + part * parts_stride, mask=mask, other=0.0)
            up += tl.load(x + part * parts_stride + INNER, mask=mask, other=0.0)
        value = silu_times(gate, up).to(DTYPE)
    return value


@triton.jit
def multiply(
    acc, weight, scale, x, valid, block, parts_stride, K: tl.constexpr, PARTS: tl.constexpr,
    INNER: tl.constexpr, DTYPE: tl.constexpr, QUANTISED: tl.constexpr, PTX: tl.constexpr,
    PRECISE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """acc [N, T] + one block of a weight tile times its inputs. x [32, T]: pointers to input 0."""
    STEP: tl.constexpr = 128 if QUANTISED else 32
    words = tl.load(weight + block * (N * 32))
    if QUANTISED and PTX:
        planes = unpack_ptx(words)
    for j in tl.static_range(STEP // 32):
        start = block * STEP + j * 32
        mask = tl.broadcast_to(valid[None, :], x.shape)
        if K % STEP != 0:
            mask = mask & (start + tl.arange(0, 32) < K)[:, None]
        value = operand(x + start, mask, parts_stride, PARTS, INNER, DTYPE)
        if QUANTISED:
            row_scale = tl.load(scale + (block * 4 + j) * N)[:, None]
            if PTX:
                w = (planes[j] * row_scale).to(DTYPE)
            else:
                w = plane(words, row_scale, j, DTYPE)
        else:
            w = words
        acc = product(w, value, acc, PRECISE)
    return acc


@triton.jit(do_not_specialize=["slots"])
def experts_up(
    x, weight, scale, block_expert, block_slots, out, slots, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, TOP_K: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr,
    SEGMENT: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr, QUANTISED: tl.constexpr,
    PTX: tl.constexpr, PRECISE: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, block of slots, segment): h [slots, INNER], or parts if SPLIT."""
    begin(PDL)
    tile, token_block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(block_expert + token_block).to(tl.int64)
    if expert >= 0:
        slot = tl.load(block_slots + token_block * T + tl.arange(0, T)).to(tl.int64)
        valid = slot < slots
        n, k = tl.arange(0, N), tl.arange(0, 32)
        base = (expert * TILES + tile) * BLOCKS * N
        w = weight + base * 32 + n[:, None] * 32 + k[None, :]
        s = scale + base * 4 + n if QUANTISED else w
        inputs = x + (slot // TOP_K)[None, :] * HIDDEN + k[:, None]
        acc = tl.zeros((N, T), tl.float32)
        if SPLIT:
            segment = tl.program_id(2)
            first = segment * SEGMENT
            last = tl.minimum(first + SEGMENT, BLOCKS)
            for block in tl.range(first, last, num_stages=STAGES):
                acc = multiply(
                    acc, w, s, inputs, valid, block, 0, HIDDEN, 0, INNER, DTYPE, QUANTISED, PTX,
                    PRECISE, N,
                )  # fmt: skip
            inner = tile * (N // 2) + n // 16 * 8 + n % 8
            column = inner + (n // 8 % 2) * INNER
            line = (segment.to(tl.int64) * slots + slot) * (2 * INNER)
            mask = (inner < INNER)[:, None] & valid[None, :]
            tl.store(out + line[None, :] + column[:, None], acc, mask=mask)
        else:
            total = tl.zeros((N, T), tl.float32)
            for block in tl.range(0, BLOCKS, num_stages=STAGES):
                acc = multiply(
                    acc, w, s, inputs, valid, block, 0, HIDDEN, 0, INNER, DTYPE, QUANTISED, PTX,
                    PRECISE, N,
                )  # fmt: skip
                if (block % SEGMENT == SEGMENT - 1) | (block == BLOCKS - 1):
                    total += acc
                    acc = tl.zeros((N, T), tl.float32)
            pairs = tl.permute(tl.reshape(total, (N // 16, 2, 8, T)), (0, 2, 3, 1))
            gate, up = tl.split(pairs)
            h = tl.reshape(silu_times(gate, up), (N // 2, T)).to(DTYPE)
            inner = tile * (N // 2) + tl.arange(0, N // 2)
            mask = (inner < INNER)[:, None] & valid[None, :]
            tl.store(out + slot[None, :] * INNER + inner[:, None], h, mask=mask)


@triton.jit
def shared_down(
    h, weight, out, tile, token_block, rows, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    PRECISE: tl.constexpr, T: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of the shared expert's output for T rows: out [rows, HIDDEN] float32."""
    BLOCKS: tl.constexpr = (INNER + 31) // 32
    row = (token_block * T + tl.arange(0, T)).to(tl.int64)
    valid = row < rows
    n, k = tl.arange(0, N), tl.arange(0, 32)
    w = weight + tile.to(tl.int64) * BLOCKS * N * 32 + n[:, None] * 32 + k[None, :]
    inputs = h + row[None, :] * INNER + k[:, None]
    acc = tl.zeros((N, T), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        acc = multiply(
            acc, w, w, inputs, valid, block, 0, INNER, 0, INNER, h.dtype.element_ty, False, False,
            PRECISE, N,
        )  # fmt: skip
    column = tile * N + n
    mask = (column < HIDDEN)[:, None] & valid[None, :]
    tl.store(out + row[None, :] * HIDDEN + column[:, None], acc, mask=mask)


@triton.jit(do_not_specialize=["slots", "rows"])
def experts_down(
    h, weight, scale, block_expert, block_slots, out, slots, shared_h, shared_weight, shared_out,
    rows, HIDDEN: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr,
    TILES: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
    QUANTISED: tl.constexpr, PTX: tl.constexpr, PRECISE: tl.constexpr, T: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, SHARED_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, block): the shared expert's blocks of T rows first, then the experts'.

    h [slots, INNER], or the up product's parts [PARTS, slots, 2 INNER].
    """
    begin(PDL)
    tile, token_block = tl.program_id(0), tl.program_id(1)
    shared_blocks = 0
    if SHARED_INNER > 0:
        shared_blocks = tl.cdiv(rows, T)
        if token_block < shared_blocks:
            shared_down(
                shared_h, shared_weight, shared_out, tile, token_block, rows, HIDDEN, SHARED_INNER,
                PRECISE, T, N, SHARED_STAGES,
            )  # fmt: skip
    token_block -= shared_blocks
    if token_block >= 0:
        expert = tl.load(block_expert + token_block).to(tl.int64)
        if expert >= 0:
            slot = tl.load(block_slots + token_block * T + tl.arange(0, T)).to(tl.int64)
            valid = slot < slots
            n, k = tl.arange(0, N), tl.arange(0, 32)
            base = (expert * TILES + tile) * BLOCKS * N
            w = weight + base * 32 + n[:, None] * 32 + k[None, :]
            s = scale + base * 4 + n if QUANTISED else w
            WIDTH: tl.constexpr = 2 * INNER if PARTS > 0 else INNER
            inputs = h + slot[None, :] * WIDTH + k[:, None]
            parts_stride = slots.to(tl.int64) * WIDTH
            acc = tl.zeros((N, T), tl.float32)
            for block in tl.range(0, BLOCKS, num_stages=STAGES):
                acc = multiply(
                    acc, w, s, inputs, valid, block, parts_stride, INNER, PARTS, INNER, DTYPE,
                    QUANTISED, PTX, PRECISE, N,
                )  # fmt: skip
            column = tile * N + n
            mask = (column < HIDDEN)[:, None] & valid[None, :]
            tl.store(out + slot[None, :] * HIDDEN + column[:, None], acc.to(DTYPE), mask=mask)


@triton.jit
def combine_kernel(
    down, weights, shared, residual, norm_weight, x_new, normed, eps, HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program, in one layout for any number of rows: the mean is a layout's sum."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, P)
    inside = column < HIDDEN
    here = row * HIDDEN + column
    y = tl.zeros((P,), tl.float32)
    for i in tl.static_range(TOP_K):
        w = tl.zeros((P,), tl.float32) + tl.load(weights + row * TOP_K + i)
        at = down + (row * TOP_K + i) * HIDDEN + column
        y = tl.fma(w, tl.load(at, mask=inside, other=0.0).to(tl.float32), y)
    if SHARED:
        y += tl.load(shared + here, mask=inside, other=0.0)
    dtype = x_new.dtype.element_ty
    new = (tl.load(residual + here, mask=inside, other=0.0).to(tl.float32) + y).to(dtype)
    tl.store(x_new + here, new, mask=inside)
    # A masked column's weight is not read, but w * 0 is NaN where w is infinite or NaN.
    wide = tl.where(inside, new.to(tl.float32), 0.0)
    mean = tl.sum(wide * wide, 0) * (1.0 / HIDDEN)
    root = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    unit = (wide * root).to(dtype).to(tl.float32)
    scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + here, (unit * scale).to(dtype), mask=inside)
