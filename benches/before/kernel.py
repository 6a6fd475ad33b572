"""Kernels of absorbed latent attention over a span table; one order of summation for every row.

query [R, HEADS, D], latents [slots, D], D = KV + ROPE: a key is its whole latent row, its value
the first KV entries. A span of N rows has N * HEADS columns of query; a tile of columns is the M
operand of both products, 64 keys are the N side of the scores and the K side of the values.
Scores are base-2 logarithms: scale holds log2(e).

The order that fixes the bits: blocks of keys with absolute borders (ZONES, see blocks.py), each of
tiles of 64 keys at absolute positions. Inside a block the online recurrence over its tiles, from
(m, n, a) = (LOWEST, 0, 0):

    top = max(m, max_k s_k),  w = round(exp2(s - top)),  n = n exp2(m - top) + sum w,
    a = a exp2(m - top) + sum w v,  m = top

with both sums in the MMA (n as a product with ones, since tl.sum would follow the layout). Blocks
are folded left, in order:

    fold(M, L, A; m, n, a):  top = max(M, m),  x = exp2(M - top),  y = exp2(m - top),
    L = fma(L, x, n y),  A = fma(A, x, a y),  M = top

A tile without visible keys changes nothing, nor does folding (LOWEST, 0, 0).

Two launches. `partials`: a program takes whole blocks of one tile of columns and stores their
(m, n, a). Of a tree these are the committed keys up to the last tile border; so the block that is
open there is a state, not yet a part. The keys behind (at most 63 committed ones and 64 ancestors,
so two tiles, gathered such that position q lies at offset q % 64 of tile q // 64) are each row's
own: further programs compute their scores and where their latents lie. `combine`, per row and
slice of value columns, folds the blocks, goes on from the stored state through the row's own
two tiles (which end at most two blocks), folds these and divides. Of a causal run all keys lie in
pages, rows mask what follows them, and `combine` only folds.

values [parts, R * HEADS, KV], high and mass [parts, R * HEADS] float32 hold a, m and n of a block;
scores [R * HEADS, 128] float32 and places [R, 128] int64 the own tiles', -1 where no key is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin, product

TILE = tl.constexpr(64)
ONES = tl.constexpr(16)  # columns of the product that adds up weights, all alike
NARROW = tl.constexpr(16)  # rows x heads of an MMA that serves one row
LOWEST = tl.constexpr(-1e30)  # finite, so that no difference of maxima is NaN


@triton.jit
def block_of(key, ZONES: tl.constexpr):
    """The block that holds position `key`; blocks.block_of on the device."""
    block = key - key
    for i in tl.static_range(len(ZONES)):
        block += tl.minimum(tl.maximum(key - ZONES[i][0], 0) // ZONES[i][2], ZONES[i][3])
    return block


@triton.jit
def first_key(block, ZONES: tl.constexpr):
    """The first position of `block`; blocks.first_key on the device."""
    key = block - block
    for i in tl.static_range(len(ZONES)):
        key += tl.minimum(tl.maximum(block - ZONES[i][1], 0), ZONES[i][3]) * ZONES[i][2]
    return key


@triton.jit
def fold(M, L, A, m, n, a):
    """Left fold of one block into those before; explicit fma, so that all kernels round alike.

    M, L [C], A [C, V], and m, n, a likewise.
    """
    top = tl.maximum(M, m)
    x, y = tl.exp2(M - top), tl.exp2(m - top)
    A = tl.fma(A, tl.broadcast_to(x[:, None], A.shape), a * y[:, None])
    return top, tl.fma(L, x, n * y), A


@triton.jit
def load_rows(
    start,
    offset,
    wanted,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows of D at start + offset [C], as [C, V] and [C, E]; zero where padded or not wanted.

    Memory that is not wanted may hold NaN, so it is not read.
    """
    d, e = tl.arange(0, V), tl.arange(0, E)
    at = start + offset[:, None]
    if MASKED or V != KV or E != ROPE:
        latent = tl.load(at + d[None, :], mask=wanted[:, None] & (d < KV)[None, :], other=0.0)
        rope = tl.load(at + KV + e[None, :], mask=wanted[:, None] & (e < ROPE)[None, :], other=0.0)
    else:
        latent, rope = tl.load(at + d[None, :]), tl.load(at + KV + e[None, :])
    return latent, rope


@triton.jit
def score(q_latent, q_rope, latent, rope, scale, APART: tl.constexpr, PRECISE: tl.constexpr):
    """q k of columns [C] and keys [64]: [C, 64]; the latent's dimensions first.

    APART: a product whose result feeds another one of the same region gets all warps along M, so
    of 8 warps both groups would compute all 64 x 64 scores. In a region of its own each takes half
    of the keys. Both conditions always hold, and differ, so that they are not merged; the other
    branches never run, and are products because the compiler would else move the conversion of
    the layout into the branch, ahead of the softmax.
    """
    s = tl.zeros([q_latent.shape[0], TILE], tl.float32)
    if APART:
        if scale > 0.0:
            s = product(q_latent, tl.trans(latent), s, PRECISE)
        else:
            s = product(q_rope, tl.trans(rope), s, PRECISE)
        if scale < -LOWEST:
            s = product(q_rope, tl.trans(rope), s, PRECISE)
        else:
            s = product(q_latent, tl.trans(latent), s, PRECISE)
    else:
        s = product(q_latent, tl.trans(latent), s, PRECISE)
        s = product(q_rope, tl.trans(rope), s, PRECISE)
    return s


@triton.jit
def add_tile(
    s,
    value,
    visible,
    scale,
    m,
    n,
    a,
    MASKED: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """One tile of the recurrence. s [C, 64], value [64, V]; state m [C], n [C, 16], a [C, V].

    visible [C, 64]; a key that is not has weight exactly 0. s * scale only meets a maximum, and
    the exponent is an explicit fma: no variant can round otherwise.
    """
    scaled = s * scale
    if MASKED:
        scaled = tl.where(visible, scaled, LOWEST)
    top = tl.maximum(m, tl.max(scaled, 1))
    shift = tl.broadcast_to(-top[:, None], s.shape)
    power = tl.fma(s, tl.full(s.shape, 0.0, tl.float32) + scale, shift)
    if MASKED:
        power = tl.where(visible, power, LOWEST)
    weight = tl.exp2(power).to(value.dtype)
    shrink = tl.exp2(m - top)
    ones = tl.full([TILE, ONES], 1.0, value.dtype)
    n = product(weight, ones, n * shrink[:, None], PRECISE)
    a = product(weight, value, a * shrink[:, None], PRECISE)
    return top, n, a


@triton.jit
def shared_blocks(
    query,
    latents,
    contexts,
    pages,
    values,
    high,
    mass,
    scale,
    first,
    count,
    columns,
    width,
    chunks,
    index,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    ZONES: tl.constexpr,
    CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    APART: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Every chunks-th block of one span, the last (and longest) first, for one tile of columns."""
    tiles = tl.cdiv(count * HEADS, COLUMNS)
    tile = index % tiles
    spans = columns // (count * HEADS)
    span = index // tiles % spans
    chunk = index // (tiles * spans)
    context = tl.load(contexts + span)
    inside = tile * COLUMNS + tl.arange(0, COLUMNS)
    known = inside < count * HEADS
    column = span * count * HEADS + inside
    position = context + first + inside // HEADS  # of a causal run's rows
    if CAUSAL:
        last = (tl.minimum(tile * COLUMNS + COLUMNS, count * HEADS) - 1) // HEADS
        length = context + first + last + 1
    else:
        length = context // TILE * TILE
    blocks = tl.where(length > 0, block_of(length - 1, ZONES) + 1, 0)
    offset = column * (KV + ROPE)
    q_latent, q_rope = load_rows(query, offset, known & (chunk < blocks), KV, ROPE, V, E, True)
    k = tl.arange(0, TILE)
    offset = k * (KV + ROPE)
    d = tl.arange(0, V)
    table = pages + span.to(tl.int64) * width
    for i in range(chunk, blocks, chunks):
        block = blocks - 1 - i
        m = tl.full([COLUMNS], LOWEST, tl.float32)
        n = tl.zeros([COLUMNS, ONES], tl.float32)
        a = tl.zeros([COLUMNS, V], tl.float32)
        start = first_key(block, ZONES) // TILE
        end = tl.cdiv(tl.minimum(first_key(block + 1, ZONES), length), TILE)
        following = tl.load(table + start)
        for t in tl.range(start, end, num_stages=STAGES):
            page = following  # read a tile ahead of the keys that it leads to
            following = tl.load(table + tl.minimum(t + 1, end - 1))
            key = t * TILE + k
            keys = latents + page.to(tl.int64) * (TILE * (KV + ROPE))
            latent, rope = load_rows(keys, offset, key < length, KV, ROPE, V, E, CAUSAL)
            visible = (key[None, :] <= position[:, None]) & known[:, None]
            if AHEAD:
                # Always true: a branch at the end of the body is scheduled behind the copies of
                # the tile after this one, so they fly while this one is worked on.
                if scale > LOWEST:
                    s = score(q_latent, q_rope, latent, rope, scale, APART, PRECISE)
                    m, n, a = add_tile(s, latent, visible, scale, m, n, a, CAUSAL, PRECISE)
            else:
                s = score(q_latent, q_rope, latent, rope, scale, APART, PRECISE)
                m, n, a = add_tile(s, latent, visible, scale, m, n, a, CAUSAL, PRECISE)
        at = block * columns + column
        tl.store(high + at, m, mask=known)
        tl.store(mass + at, tl.max(n, 1), mask=known)
        tl.store(values + at[:, None] * KV + d[None, :], a, mask=known[:, None] & (d < KV)[None, :])


@triton.jit
def own_scores(
    query,
    latents,
    slots,
    contexts,
    pages,
    ancestors,
    scores,
    places,
    scale,
    count,
    width,
    index,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Scores of one of a tree row's own two tiles, for 16 heads, and where its latents lie."""
    tiles: tl.constexpr = (HEADS + NARROW - 1) // NARROW
    which = index % 2
    tile = index // 2 % tiles
    row = index // (2 * tiles)
    span = row // count
    context = tl.load(contexts + span)
    j = tl.arange(0, 64)
    on = (tl.load(ancestors + row) >> j.to(tl.int64)) & 1
    on = tl.where(j < count, on.to(tl.int32), 0)
    rank = tl.cumsum(on, 0) - on  # how many ancestors come before row j of the span
    own = tl.load(slots + span * count + j, mask=on != 0, other=0)
    first = context // TILE * TILE + which * TILE
    k = tl.arange(0, TILE)
    key = first + k
    committed = key < context
    page = tl.load(pages + span.to(tl.int64) * width + first // TILE, mask=first < context, other=0)
    mine = (on[None, :] != 0) & (rank[None, :] == (key - context)[:, None])
    gathered = tl.sum(tl.where(mine, own[None, :], 0), 1)
    slot = tl.where(committed, page.to(tl.int64) * TILE + k, gathered)
    wanted = key < context + tl.sum(on, 0)
    tl.store(places + row * (2 * TILE) + which * TILE + k, tl.where(wanted, slot, -1))
    head = tile * NARROW + tl.arange(0, NARROW)
    column = row * HEADS + head
    known = head < HEADS
    offset = column * (KV + ROPE)
    q_latent, q_rope = load_rows(query, offset, known, KV, ROPE, V, E, True)
    latent, rope = load_rows(latents, slot * (KV + ROPE), wanted, KV, ROPE, V, E, True)
    s = score(q_latent, q_rope, latent, rope, scale, False, PRECISE)
    at = scores + (column * (2 * TILE) + which * TILE)[:, None] + k[None, :]
    tl.store(at, s, mask=known[:, None])


@triton.jit(do_not_specialize=["first", "count", "columns", "width", "chunks", "shared"])
def partials(
    query,
    latents,
    slots,
    contexts,
    pages,
    ancestors,
    values,
    high,
    mass,
    scores,
    places,
    scale,
    first,
    count,
    columns,
    width,
    chunks,
    shared,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    ZONES: tl.constexpr,
    CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    APART: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs 0..shared-1 take blocks in pages, for all rows; the rest one own tile each.

    query [S * count, HEADS, D], slots [S * count] int64, contexts [S], pages [S, width] int32,
    ancestors [S * count] int64 (unused if CAUSAL); first: rows of a causal run before these.
    """
    begin(PDL)
    index = tl.program_id(0)
    if index < shared:
        shared_blocks(
            query,
            latents,
            contexts,
            pages,
            values,
            high,
            mass,
            scale,
            first,
            count,
            columns,
            width,
            chunks,
            index,
            HEADS,
            KV,
            ROPE,
            V,
            E,
            ZONES,
            CAUSAL,
            COLUMNS,
            STAGES,
            APART,
            AHEAD,
            PRECISE,
        )
    elif not CAUSAL:
        own_scores(
            query,
            latents,
            slots,
            contexts,
            pages,
            ancestors,
            scores,
            places,
            scale,
            count,
            width,
            index - shared,
            HEADS,
            KV,
            ROPE,
            V,
            E,
            PRECISE,
        )


@triton.jit
def read_part(values, high, mass, part, columns, column, known, d, KV: tl.constexpr):
    """A block's (m, n, a) for columns [C] and values d [W]; no key's where not known."""
    at = part * columns + column
    m = tl.load(high + at, mask=known, other=LOWEST)
    n = tl.load(mass + at, mask=known, other=0.0)
    inside = known[:, None] & (d < KV)[None, :]
    a = tl.load(values + at[:, None] * KV + d[None, :], mask=inside, other=0.0)
    return m, n, a


@triton.jit
def read_own(
    latents,
    scores,
    places,
    row,
    column,
    known,
    d,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    WHICH: tl.constexpr,
):
    """One of a tree row's own tiles: scores [C, 64], value [64, W], visible [C, 64]."""
    k = tl.arange(0, TILE)
    place = tl.load(places + row * (2 * TILE) + WHICH * TILE + k)
    at = scores + (column * (2 * TILE) + WHICH * TILE)[:, None] + k[None, :]
    s = tl.load(at, mask=known[:, None], other=0.0)
    inside = (place >= 0)[:, None] & (d < KV)[None, :]
    value = tl.load(latents + (place * (KV + ROPE))[:, None] + d[None, :], mask=inside, other=0.0)
    return s, value, tl.broadcast_to((place >= 0)[None, :], s.shape)


@triton.jit
def fold_state(M, L, A, m, n, a, FOLDED: tl.constexpr):
    """Fold a state of 16 columns, which repeat each other, into sums of FOLDED columns."""
    more: tl.constexpr = NARROW // FOLDED
    m = tl.max(tl.reshape(m, [more, FOLDED]), 0)
    n = tl.max(tl.reshape(tl.max(n, 1), [more, FOLDED]), 0)
    a = tl.max(tl.reshape(a, [more, FOLDED, a.shape[1]]), 0)
    return fold(M, L, A, m, n, a)


@triton.jit(do_not_specialize=["first", "count", "columns"])
def combine(
    values,
    high,
    mass,
    scores,
    places,
    latents,
    out,
    contexts,
    scale,
    first,
    count,
    columns,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    ZONES: tl.constexpr,
    CAUSAL: tl.constexpr,
    FOLDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BATCH: tl.constexpr,
    PRECISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """WIDTH values of FOLDED heads of a row: its blocks in order; out [R * HEADS, KV].

    The loop reads BATCH blocks before it adds them. The barrier keeps the assembler from moving
    the loads down to their uses, so all of them are in flight together; it needs a program of two
    warps, since in one it is no instruction. FOLDED heads, at most 16, are repeated to fill an MMA.
    """
    begin(PDL)
    tiles: tl.constexpr = (HEADS + FOLDED - 1) // FOLDED
    row = tl.program_id(0) // tiles
    base = tl.program_id(0) % tiles * FOLDED
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    context = tl.load(contexts + row // count)
    head = base + tl.arange(0, FOLDED)
    column, known = row * HEADS + head, head < HEADS
    if CAUSAL:
        parts = block_of(context + first + row, ZONES) + 1
    else:
        wide = base + tl.arange(0, NARROW) % FOLDED
        wide_column, wide_known = row * HEADS + wide, wide < HEADS
        s0, value0, seen0 = read_own(
            latents, scores, places, row, wide_column, wide_known, d, KV, ROPE, 0
        )
        s1, value1, seen1 = read_own(
            latents, scores, places, row, wide_column, wide_known, d, KV, ROPE, 1
        )
        closed = context // TILE * TILE
        parts = block_of(closed, ZONES)
        begun = wide_known & (closed > first_key(parts, ZONES))
        m, mn, a = read_part(values, high, mass, parts, columns, wide_column, begun, d, KV)
    M = tl.full([FOLDED], LOWEST, tl.float32)
    L = tl.zeros([FOLDED], tl.float32)
    A = tl.zeros([FOLDED, WIDTH], tl.float32)
    for start in range(0, parts, BATCH):
        read = ()
        for i in tl.static_range(BATCH):
            part = start + i
            there = known & (part < parts)
            read += (read_part(values, high, mass, part, columns, column, there, d, KV),)
        tl.debug_barrier()
        for i in tl.static_range(BATCH):
            M, L, A = fold(M, L, A, read[i][0], read[i][1], read[i][2])
    if not CAUSAL:
        n = tl.broadcast_to(mn[:, None], [NARROW, ONES])
        m, n, a = add_tile(s0, value0, seen0, scale, m, n, a, True, PRECISE)
        if first_key(parts + 1, ZONES) == closed + TILE:  # the second tile begins a block
            M, L, A = fold_state(M, L, A, m, n, a, FOLDED)
            m = tl.full([NARROW], LOWEST, tl.float32)
            n = tl.zeros([NARROW, ONES], tl.float32)
            a = tl.zeros([NARROW, WIDTH], tl.float32)
        m, n, a = add_tile(s1, value1, seen1, scale, m, n, a, True, PRECISE)
        M, L, A = fold_state(M, L, A, m, n, a, FOLDED)
    result = tl.where(L[:, None] > 0.0, A / L[:, None], 0.0)  # a row that sees nothing gives 0
    at = out + column.to(tl.int64)[:, None] * KV + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=known[:, None] & (d < KV)[None, :])
