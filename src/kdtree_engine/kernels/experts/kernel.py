"""Routed experts over blocks of choices, the shared expert's down product, and their combination.

    up        h [R k, I]      = silu(gate_e x_row) * (up_e x_row)       for slot = row * k + choice
    down      d [R k, H]      = down_e h;   shared [R, H] = shared_down shared_h, in the same launch
    combine   y               = sum over k in order of fma(w_k, d_k, y), then + shared
              x_new [R, H]    = dtype(residual + y)
              normed [R, H]   = dtype(x_new / sqrt(mean(x_new^2) + eps)) * norm_weight

Weights lie in tiles of TILE rows, and a tile's blocks of STEP inputs follow each other in memory:

    INT4    words [E, tiles, K / 128, TILE, 32] int16, scales [E, tiles, K / 32, TILE] bf16;
            STEP = 128;
            nibble j of word i of a row is q + 8 of input 32 j + i, so a nibble plane has one scale.
            The weight is bf16(q * scale), the checkpoint's value.
    FP8     words [E, tiles, K / 64, TILE, 32] int16, scales [E, tiles, K / 64, TILE / 8] float32;
            STEP = 64;
            a word's low byte is an input of the first 32, its high byte of the next. Eight rows
            stand in one block of scales. The weight is value * scale, rounded to x's dtype.
    dense   weights [E, tiles, K / 32, TILE, 32], STEP = 32

PLANES inputs lie in a word: 4, 2 or 1.

In an up tile rows 16 i .. 16 i + 7 are gates and the next eight their ups: a thread of the MMA
holds rows r and r + 8 of sixteen, so it has both. The weights are the MMA's M operand, a block's
tokens its N side.

up cuts K into S segments, each with an accumulator of its own, added in order. Where there are few
blocks one program runs all segments side by side (JOINT), a warp each: a product with a leading
dimension. Otherwise it runs one after the other. The bits are the same. A program takes N rows of
a tile of TILE; any multiple of 16 will do, as gates and ups alternate by eight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.fp8.kernel import planes as fp8_planes
from kdtree_engine.kernels.prologue import begin, product
from kdtree_engine.kernels.swiglu.kernel import silu_times


@triton.jit
def unpack_ptx(words, s0, s1, s2, s3):
    """int16 words to their four planes of bf16(q * scale); two words lie in one register.

    s0 .. s3: the planes' scales, [N, 1]. A nibble OR-ed into the mantissa of bf16 128 is
    128 + q + 8, and subtracting 136 is exact. Outputs are written before the last input is read.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, m, o, b;
        mov.b32 m, 0x000f000f;
        mov.b32 o, 0x43004300;
        mov.b32 b, 0x43084308;
        lop3.b32 t, $4, m, o, 0xEA;
        sub.bf16x2 t, t, b;
        mul.bf16x2 $0, t, $5;
        shr.u32 t, $4, 4;
        lop3.b32 t, t, m, o, 0xEA;
        sub.bf16x2 t, t, b;
        mul.bf16x2 $1, t, $6;
        shr.u32 t, $4, 8;
        lop3.b32 t, t, m, o, 0xEA;
        sub.bf16x2 t, t, b;
        mul.bf16x2 $2, t, $7;
        shr.u32 t, $4, 12;
        lop3.b32 t, t, m, o, 0xEA;
        sub.bf16x2 t, t, b;
        mul.bf16x2 $3, t, $8;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [words, s0, s1, s2, s3],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def plane(words, scale, J: tl.constexpr, DTYPE: tl.constexpr):
    """bf16(q * scale) of nibble plane J, in DTYPE: what unpack_ptx returns.

    Rounded by hand, to nearest and ties to even: the interpreter's own bfloat16 cuts the bits off.
    """
    q = ((words >> (4 * J)) & 15).to(tl.float32) - 8.0
    bits = (q * scale.to(tl.float32)).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def inputs(x, valid, k, start, K: tl.constexpr, CHECK: tl.constexpr):
    """32 inputs of each token, from input `start` on; those of K and beyond are zeros if CHECK."""
    mask = valid
    if CHECK:
        mask = valid & (k + start < K)
    return tl.load(x + start, mask=mask, other=0.0)


@triton.jit
def four_of(scales):
    """The four planes [.., N, 1] of a block's scales [.., 4, N].

    One load: a plane alone is too little for an asynchronous copy where N is small.
    """
    N: tl.constexpr = scales.shape[len(scales.shape) - 1]
    if len(scales.shape) == 3:
        S: tl.constexpr = scales.shape[0]
        low = tl.permute(tl.reshape(scales, (S, 2, 2, N)), (0, 3, 1, 2))
    else:
        low = tl.permute(tl.reshape(scales, (2, 2, N)), (2, 0, 1))
    even, odd = tl.split(low)
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return (
        tl.expand_dims(s0, -1), tl.expand_dims(s1, -1), tl.expand_dims(s2, -1),
        tl.expand_dims(s3, -1),
    )  # fmt: skip


@triton.jit
def scale_places(n, PLANES: tl.constexpr, TILE: tl.constexpr):
    """Where the scales of rows n lie in a block's: [4, N], or [N] where FP8."""
    if PLANES == 4:
        at = tl.arange(0, 4)[:, None] * TILE + n[None, :]
    else:
        at = n // 8
    return at


@triton.jit
def multiply(
    acc, weight, scale, x, valid, k, step, block, BLOCKS: tl.constexpr, K: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, PLANES: tl.constexpr, PTX: tl.constexpr,
    PRECISE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """acc [.., N, T] + a block of weights, `step` after those pointed to, times its inputs.

    With a leading dimension of segments, each has its own block. weight [.., N, 32], scale
    [.., 4, N] or [.., N], x [.., 32, T]: pointers to the first block's; k [.., 32, 1]: its inputs.
    block [.., 1]: which block it is, read where MASKED: it may lie beyond the last.
    """
    STEP: tl.constexpr = 32 * PLANES
    if MASKED:
        here = tl.expand_dims(block < BLOCKS, -1)
        words = tl.load(weight, mask=tl.broadcast_to(here, weight.shape), other=0)
    else:
        words = tl.load(weight)
    if PLANES > 1:
        PER_BLOCK: tl.constexpr = 4 * TILE if PLANES == 4 else TILE // 8
        at = scale + step * PER_BLOCK
        if MASKED:
            here = block < BLOCKS
            if PLANES == 4:
                here = tl.expand_dims(here, -1)
            scales = tl.load(at, mask=tl.broadcast_to(here, at.shape), other=0.0)
        else:
            scales = tl.load(at)
    if PLANES == 2:
        planes = fp8_planes(words, tl.expand_dims(scales, -1), DTYPE, PTX)
    if PLANES == 4:
        s0, s1, s2, s3 = four_of(scales)
        if PTX:
            planes = unpack_ptx(words, s0, s1, s2, s3)
        else:
            planes = (
                plane(words, s0, 0, DTYPE),
                plane(words, s1, 1, DTYPE),
                plane(words, s2, 2, DTYPE),
                plane(words, s3, 3, DTYPE),
            )
    for j in tl.static_range(STEP // 32):
        value = inputs(x, valid, k, step * STEP + j * 32, K, MASKED or K % STEP != 0)
        if PLANES > 1:
            w = planes[j].to(DTYPE)
        else:
            w = words
        acc = product(w, value, acc, PRECISE)
    return acc


@triton.jit
def in_order(acc, S: tl.constexpr, N: tl.constexpr, T: tl.constexpr):
    """((acc[0] + acc[1]) + acc[2]) + ..., of acc [S, N, T]; S is 1, 2, 4 or 8."""
    if S == 1:
        total = tl.reshape(acc, (N, T))
    elif S == 2:
        a, b = tl.split(tl.permute(acc, (1, 2, 0)))
        total = a + b
    elif S == 4:
        even, odd = tl.split(tl.permute(tl.reshape(acc, (2, 2, N, T)), (2, 3, 0, 1)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        total = ((a + b) + c) + d
    else:
        even, odd = tl.split(tl.permute(tl.reshape(acc, (2, 2, 2, N, T)), (3, 4, 0, 1, 2)))
        even_low, even_high = tl.split(even)  # segments 0 and 4, 2 and 6
        odd_low, odd_high = tl.split(odd)
        a, e = tl.split(even_low)
        c, g = tl.split(even_high)
        b, f = tl.split(odd_low)
        d, h = tl.split(odd_high)
        total = ((((((a + b) + c) + d) + e) + f) + g) + h
    return total


@triton.jit
def joint_sum(
    weight, scale, x, line, valid, HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, S: tl.constexpr,
    DTYPE: tl.constexpr, PLANES: tl.constexpr, PTX: tl.constexpr, PRECISE: tl.constexpr,
    T: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[N, T] of all segments side by side, a warp each. line [T]: where a token's inputs start."""
    SEGMENT: tl.constexpr = (BLOCKS + S - 1) // S
    STEP: tl.constexpr = 32 * PLANES
    MASKED: tl.constexpr = BLOCKS % S != 0
    first = tl.arange(0, S)[:, None] * SEGMENT
    n, k = tl.arange(0, N), tl.arange(0, 32)
    w = weight + first[:, :, None] * (TILE * 32) + n[None, :, None] * 32 + k[None, None, :]
    s = w
    if PLANES > 1:
        PER_BLOCK: tl.constexpr = 4 * TILE if PLANES == 4 else TILE // 8
        start = first * PER_BLOCK
        if PLANES == 4:
            start = tl.expand_dims(start, -1)
        s = scale + start + tl.expand_dims(scale_places(n, PLANES, TILE), 0)
    ks = first[:, :, None] * STEP + k[None, :, None]
    own = x + line[None, None, :] + ks
    valid = tl.broadcast_to(valid[None, None, :], own.shape)
    acc = tl.zeros((S, N, T), tl.float32)
    for step in tl.range(0, SEGMENT, num_stages=STAGES):
        acc = multiply(
            acc, w + step * (TILE * 32), s, own, valid, ks, step, first + step, BLOCKS, HIDDEN,
            MASKED, DTYPE, PLANES, PTX, PRECISE, TILE,
        )  # fmt: skip
    return in_order(acc, S, N, T)


@triton.jit
def whole_sum(
    weight, scale, x, line, valid, HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, S: tl.constexpr,
    DTYPE: tl.constexpr, PLANES: tl.constexpr, PTX: tl.constexpr, PRECISE: tl.constexpr,
    T: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[N, T] of one segment after the other: the bits of joint_sum."""
    SEGMENT: tl.constexpr = (BLOCKS + S - 1) // S
    n, k = tl.arange(0, N), tl.arange(0, 32)
    w = weight + n[:, None] * 32 + k[None, :]
    s = scale + scale_places(n, PLANES, TILE) if PLANES > 1 else w
    own = x + line[None, :] + k[:, None]
    valid = tl.broadcast_to(valid[None, :], own.shape)
    acc = tl.zeros((N, T), tl.float32)
    total = tl.zeros((N, T), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        acc = multiply(
            acc, w + block * (TILE * 32), s, own, valid, k[:, None], block, block, BLOCKS,
            HIDDEN, False, DTYPE, PLANES, PTX, PRECISE, TILE,
        )  # fmt: skip
        if (block % SEGMENT == SEGMENT - 1) | (block == BLOCKS - 1):
            total += acc
            acc = tl.zeros((N, T), tl.float32)
    return total


@triton.jit
def place_of(
    weight, scale, first_block, part, BLOCKS: tl.constexpr, PLANES: tl.constexpr, N: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Pointers to a weight, moved by `first_block` blocks of tiles and then to the first block of
    its part-th N rows.
    """
    tile, row = part // (TILE // N), part % (TILE // N) * N
    block = first_block + tl.cast(tile, tl.int64) * BLOCKS
    w = weight + (block * TILE + row) * 32
    s = w
    if PLANES > 1:
        PER_BLOCK: tl.constexpr = 4 * TILE if PLANES == 4 else TILE // 8
        s = scale + block * PER_BLOCK + (row if PLANES == 4 else row // 8)
    return w, s


@triton.jit(do_not_specialize=["slots"])
def experts_up(
    x, weight, scale, block_expert, block_slots, out, slots, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, TOP_K: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr,
    S: tl.constexpr, JOINT: tl.constexpr, DTYPE: tl.constexpr, PLANES: tl.constexpr,
    PTX: tl.constexpr, PRECISE: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (N rows of a tile of TILE, block of slots): h [slots, INNER]."""
    begin(PDL)
    part, token_block = tl.program_id(0), tl.program_id(1)
    # Both loads are under way before the branch waits for one.
    slot = tl.load(block_slots + token_block * T + tl.arange(0, T)).to(tl.int64)
    expert = tl.load(block_expert + token_block).to(tl.int64)
    if expert >= 0:
        valid = slot < slots
        first_block = expert * TILES * BLOCKS
        w, s = place_of(weight, scale, first_block, part, BLOCKS, PLANES, N, TILE)
        line = slot // TOP_K * HIDDEN
        if JOINT:
            total = joint_sum(
                w, s, x, line, valid, HIDDEN, BLOCKS, S, DTYPE, PLANES, PTX, PRECISE, T, N,
                TILE, STAGES,
            )  # fmt: skip
        else:
            total = whole_sum(
                w, s, x, line, valid, HIDDEN, BLOCKS, S, DTYPE, PLANES, PTX, PRECISE, T, N,
                TILE, STAGES,
            )  # fmt: skip
        pairs = tl.permute(tl.reshape(total, (N // 16, 2, 8, T)), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        h = tl.reshape(silu_times(gate, up), (N // 2, T)).to(DTYPE)
        inner = part * (N // 2) + tl.arange(0, N // 2)
        mask = (inner < INNER)[:, None] & valid[None, :]
        tl.store(out + slot[None, :] * INNER + inner[:, None], h, mask=mask)


@triton.jit
def store_rows(acc, out, out_line, valid, part, HIDDEN: tl.constexpr, N: tl.constexpr):
    """acc [N, T] to the part-th N of a token's HIDDEN outputs."""
    column = part * N + tl.arange(0, N)
    mask = (column < HIDDEN)[:, None] & valid[None, :]
    tl.store(out + out_line[None, :] + column[:, None], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rows_of_tiles(
    weight, scale, x, line, valid, out, out_line, first, HIDDEN: tl.constexpr,
    PIECES: tl.constexpr, PARTS: tl.constexpr, INNER: tl.constexpr,
    BLOCKS: tl.constexpr, DTYPE: tl.constexpr, PLANES: tl.constexpr, PTX: tl.constexpr,
    PRECISE: tl.constexpr, T: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """PIECES times N output rows, of PARTS such, from the first-th on, in one pipeline.

    Pieces beyond the last repeat it. line, out_line [T]: where a token's inputs and outputs start.
    """
    n, k = tl.arange(0, N), tl.arange(0, 32)
    weight = weight + n[:, None] * 32 + k[None, :]
    scale = scale + scale_places(n, PLANES, TILE) if PLANES > 1 else weight
    own = x + line[None, :] + k[:, None]
    inside = tl.broadcast_to(valid[None, :], own.shape)
    acc = tl.zeros((N, T), tl.float32)
    for step in tl.range(0, PIECES * BLOCKS, num_stages=STAGES):
        part, block = tl.minimum(first + step // BLOCKS, PARTS - 1), step % BLOCKS
        w, s = place_of(weight, scale, 0, part, BLOCKS, PLANES, N, TILE)
        acc = multiply(
            acc, w + block * (TILE * 32), s, own, inside, k[:, None], block, block,
            BLOCKS, INNER, False, DTYPE, PLANES, PTX, PRECISE, TILE,
        )  # fmt: skip
        if block == BLOCKS - 1:
            store_rows(acc, out, out_line, valid, part, HIDDEN, N)
            acc = tl.zeros((N, T), tl.float32)


@triton.jit(do_not_specialize=["slots", "rows"])
def experts_down(
    h, weight, scale, block_expert, block_slots, out, slots, shared_h, shared_weight, shared_out,
    rows, HIDDEN: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr,
    TILES: tl.constexpr, BLOCKS: tl.constexpr, DTYPE: tl.constexpr, PLANES: tl.constexpr,
    PTX: tl.constexpr, PRECISE: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    SHARED_T: tl.constexpr, SHARED_N: tl.constexpr, SHARED_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The shared expert's programs first, SHARED_N rows for SHARED_T tokens, then the experts'.

    An expert's program takes PIECES times N rows, N of one tile of TILE; h [slots, INNER].
    """
    begin(PDL)
    program = tl.program_id(0)
    shared_programs = 0
    if SHARED_INNER > 0:
        SHARED_PARTS: tl.constexpr = TILES * (TILE // SHARED_N)
        shared_programs = tl.cdiv(rows, SHARED_T) * SHARED_PARTS
        if program < shared_programs:
            row = program // SHARED_PARTS * SHARED_T + tl.arange(0, SHARED_T).to(tl.int64)
            rows_of_tiles(
                shared_weight, shared_weight, shared_h, row * SHARED_INNER, row < rows,
                shared_out, row * HIDDEN, program % SHARED_PARTS, HIDDEN, 1, SHARED_PARTS,
                SHARED_INNER, (SHARED_INNER + 31) // 32, DTYPE, 1, False, PRECISE,
                SHARED_T, SHARED_N, TILE, SHARED_STAGES,
            )  # fmt: skip
    program -= shared_programs
    if program >= 0:
        PARTS: tl.constexpr = TILES * (TILE // N)
        GROUPS: tl.constexpr = (PARTS + PIECES - 1) // PIECES
        token_block = program // GROUPS
        # Both loads are under way before the branch waits for one.
        slot = tl.load(block_slots + token_block * T + tl.arange(0, T)).to(tl.int64)
        expert = tl.load(block_expert + token_block).to(tl.int64)
        if expert >= 0:
            first_block = expert * TILES * BLOCKS
            w, s = place_of(weight, scale, first_block, 0, BLOCKS, PLANES, N, TILE)
            first = program % GROUPS * PIECES
            rows_of_tiles(
                w, s, h, slot * INNER, slot < slots, out, slot * HIDDEN, first, HIDDEN,
                PIECES, PARTS, INNER, BLOCKS, DTYPE, PLANES, PTX, PRECISE, T, N, TILE,
                STAGES,
            )  # fmt: skip


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
    # One program reads all of a row: what it takes is the wait for its loads, so none waits for
    # another's use.
    values = ()
    for i in tl.static_range(TOP_K):
        at = down + (row * TOP_K + i) * HIDDEN + column
        values = values + (tl.load(at, mask=inside, other=0.0),)
    before = tl.load(residual + here, mask=inside, other=0.0)
    scale = tl.load(norm_weight + column, mask=inside, other=0.0)
    y = tl.zeros((P,), tl.float32)
    for i in tl.static_range(TOP_K):
        w = tl.zeros((P,), tl.float32) + tl.load(weights + row * TOP_K + i)
        y = tl.fma(w, values[i].to(tl.float32), y)
    if SHARED:
        y += tl.load(shared + here, mask=inside, other=0.0)
    dtype = x_new.dtype.element_ty
    new = (before.to(tl.float32) + y).to(dtype)
    tl.store(x_new + here, new, mask=inside)
    # A masked column's weight is not read, but w * 0 is NaN where w is infinite or NaN.
    wide = tl.where(inside, new.to(tl.float32), 0.0)
    mean = tl.sum(wide * wide, 0) * (1.0 / HIDDEN)
    root = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    unit = (wide * root).to(dtype).to(tl.float32)
    tl.store(normed + here, (unit * scale.to(tl.float32)).to(dtype), mask=inside)
