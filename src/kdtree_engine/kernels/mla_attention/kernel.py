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
own: further programs score the open tile's keys and the span's rows, for all rows alike, and say
which of them a row sees, and where in its two tiles. `combine`, per row and
slice of value columns, folds the blocks, goes on from the stored state through the row's own
two tiles (which end at most two blocks), folds these and divides. Of a causal run all keys lie in
pages, rows mask what follows them, and `combine` only folds.

values [parts, R * HEADS, KV], high and mass [parts, R * HEADS] float32 hold a, m and n of a block;
scores [R * HEADS, 128] float32: of the open tile's 64 keys, then of the span's rows; places
[R, 128] int64: the key at each place of a row's two tiles, slot * 128 + its column of `scores`, or
-1 where there is none.
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
def block_at(turn, chunk, chunks, blocks, length, ZONES: tl.constexpr):
    """The block that a chunk takes in its `turn`, its first tile and its end; none: 0, 0, 0.

    The last blocks, which are the longest, are dealt first, forwards and backwards in turns.
    """
    place = tl.where(turn % 2 == 0, chunk, chunks - 1 - chunk)
    block = blocks - 1 - turn * chunks - place
    start = first_key(tl.maximum(block, 0), ZONES) // TILE
    end = tl.cdiv(tl.minimum(first_key(tl.maximum(block, 0) + 1, ZONES), length), TILE)
    return block, tl.where(block < 0, 0, start), tl.where(block < 0, 0, end)


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
    kept = n * shrink[:, None]
    if PRECISE:
        # Without an MMA the product with ones begins with an addition, which some kernels would
        # fuse with this multiplication, and others not.
        shape: tl.constexpr = n.shape
        kept = tl.fma(n, tl.broadcast_to(shrink[:, None], shape), tl.zeros(shape, tl.float32))
    n = product(weight, ones, kept, PRECISE)
    a = product(weight, value, a * shrink[:, None], PRECISE)
    return top, n, a


@triton.jit
def store_values(place, a, known, KV: tl.constexpr, V: tl.constexpr, PTX: tl.constexpr):
    """a [C, V] to place [C, V], where known [C].

    tl.store would exchange values between threads through shared memory, for which there is no
    room beside the tiles under way. In an accumulator two neighbours of a row follow one another.
    """
    wanted = tl.broadcast_to(known[:, None] & (tl.arange(0, V) < KV)[None, :], a.shape)
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $6, 0;
            @p st.global.v2.f32 [$2], {$4, $5};
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            }""",
            "=r,=r,l,l,f,f,r,r",
            [place.to(tl.int64), a, wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=2,
        )
    else:
        tl.store(place, a, mask=wanted)


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
    PTX: tl.constexpr,
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
    steps = chunk - chunk  # a scalar loop: a vector's sum is not uniform to the compiler
    for turn in range(tl.cdiv(blocks, chunks)):
        _, t, end = block_at(turn, chunk, chunks, blocks, length, ZONES)
        steps += end - t
    offset = column * (KV + ROPE)
    q_latent, q_rope = load_rows(query, offset, known & (steps > 0), KV, ROPE, V, E, True)
    k = tl.arange(0, TILE)
    offset = k * (KV + ROPE)
    d = tl.arange(0, V)
    table = pages + span.to(tl.int64) * width
    m = tl.full([COLUMNS], LOWEST, tl.float32)
    n = tl.zeros([COLUMNS, ONES], tl.float32)
    a = tl.zeros([COLUMNS, V], tl.float32)
    turn = chunk - chunk
    block, t, end = block_at(turn, chunk, chunks, blocks, length, ZONES)
    following = tl.load(table + t)
    for _ in tl.range(0, steps, num_stages=STAGES):
        page, now, here, ended = following, t, block, t + 1 >= end
        turn += ended.to(tl.int32)
        block, start, end = block_at(turn, chunk, chunks, blocks, length, ZONES)
        t = tl.where(ended, start, t + 1)
        following = tl.load(table + t)  # a tile ahead of the keys that it leads to
        key = now * TILE + k
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
        if ended:
            at = here * columns + column
            tl.store(high + at, m, mask=known)
            tl.store(mass + at, tl.max(n, 1), mask=known)
            store_values(values + at[:, None] * KV + d[None, :], a, known, KV, V, PTX)
            m = tl.full([COLUMNS], LOWEST, tl.float32)
            n = tl.zeros([COLUMNS, ONES], tl.float32)
            a = tl.zeros([COLUMNS, V], tl.float32)


@triton.jit
def own_places(
    places,
    ancestors,
    slot,
    page,
    context,
    count,
    span,
    tile,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Where the keys of a column tile's rows lie: 128 a row, from the last tile border on.

    A place is slot * 128 + i, i as in the scores; -1 where no key is. slot [64]: the span's rows.
    ROWS: rows that a tile of columns can meet. A row in two tiles is written twice, alike.
    """
    row = tile * COLUMNS // HEADS + tl.arange(0, ROWS)
    known = ((row < count) & (row * HEADS < (tile + 1) * COLUMNS))[:, None]
    j = tl.arange(0, TILE)
    bits = tl.load(ancestors + span * count + row, mask=row < count, other=0)
    on = ((bits[:, None] >> j.to(tl.int64)[None, :]) & 1).to(tl.int32)
    on = tl.where((j < count)[None, :], on, 0)
    rank = tl.cumsum(on, 1) - on  # how many ancestors come before row j of the span
    committed = context % TILE
    start = places + ((span * count + row) * (2 * TILE))[:, None]
    wanted = known & (j < committed)[None, :]
    shared = (page * TILE + j) * (2 * TILE) + j
    tl.store(start + j[None, :], tl.broadcast_to(shared[None, :], on.shape), mask=wanted)
    mine = slot * (2 * TILE) + TILE + j
    wanted = known & (on != 0)
    tl.store(start + committed + rank, tl.broadcast_to(mine[None, :], on.shape), mask=wanted)
    place = tl.arange(0, 2 * TILE)[None, :]
    wanted = known & (place >= committed + tl.sum(on, 1)[:, None])
    tl.store(start + place, tl.full(wanted.shape, -1, tl.int64), mask=wanted)


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
    columns,
    width,
    index,
    programs,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Scores of a tile of columns on all keys that are some row's own, and which those are.

    scores [R * HEADS, 128]: the open tile's 64 keys, then the span's rows. Each row picks its
    ancestors among them by its places: a score depends on its row and key alone.
    """
    tiles = tl.cdiv(count * HEADS, COLUMNS)
    k = tl.arange(0, TILE)
    for unit in tl.range(index, columns // (count * HEADS) * tiles * 2, programs, num_stages=1):
        which = unit % 2
        tile = unit // 2 % tiles
        span = unit // (2 * tiles)
        inside = tile * COLUMNS + tl.arange(0, COLUMNS)
        known = inside < count * HEADS
        column = span * count * HEADS + inside
        q_latent, q_rope = load_rows(query, column * (KV + ROPE), known, KV, ROPE, V, E, True)
        slot = tl.load(slots + span * count + k, mask=k < count, other=0)
        context = tl.load(contexts + span)
        committed = context % TILE
        at = pages + span.to(tl.int64) * width + context // TILE
        page = tl.load(at, mask=committed > 0, other=0).to(tl.int64)
        key = tl.where(which == 0, page * TILE + k, slot)
        wanted = k < tl.where(which == 0, committed, count)
        latent, rope = load_rows(latents, key * (KV + ROPE), wanted, KV, ROPE, V, E, True)
        s = score(q_latent, q_rope, latent, rope, scale, False, PRECISE)
        at = scores + ((column * 2 + which) * TILE)[:, None] + k[None, :]
        tl.store(at, s, mask=known[:, None])
        if which == 1:
            own_places(
                places, ancestors, slot, page, context, count, span, tile, HEADS, COLUMNS, ROWS
            )


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
    PTX: tl.constexpr,
    SHORT: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs 0..shared-1 take blocks in pages; the rest, trees only, the rows' own keys.

    query [S * count, HEADS, D], slots [S * count] int64, contexts [S], pages [S, width] int32,
    ancestors [S * count] int64 (unused if CAUSAL); first: rows of a causal run before these.
    A span of up to LIMIT committed keys goes in tiles of SHORT columns, if these are fewer: only
    where it is alone (S = 1). The host cannot choose this, a graph serves every context.
    """
    begin(PDL)
    index = tl.program_id(0)
    if index < shared:
        narrow = False
        if SHORT < COLUMNS:
            narrow = tl.load(contexts) <= LIMIT
            tiles = tl.cdiv(columns, SHORT)
            if narrow & (index < shared // tiles * tiles):
                shared_blocks(
                    query, latents, contexts, pages, values, high, mass, scale, first, count,
                    columns, width, shared // tiles, index, HEADS, KV, ROPE, V, E, ZONES, CAUSAL,
                    SHORT, 3, False, False, PTX, PRECISE,
                )  # fmt: skip
        if narrow == 0:
            shared_blocks(
                query, latents, contexts, pages, values, high, mass, scale, first, count, columns,
                width, chunks, index, HEADS, KV, ROPE, V, E, ZONES, CAUSAL, COLUMNS, STAGES, APART,
                AHEAD, PTX, PRECISE,
            )  # fmt: skip
    elif not CAUSAL:
        own_scores(
            query, latents, slots, contexts, pages, ancestors, scores, places, scale, count,
            columns, width, index - shared, tl.num_programs(0) - shared, HEADS, KV, ROPE, V, E,
            COLUMNS, ROWS, PRECISE,
        )  # fmt: skip


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
    slot = place // (2 * TILE) * (KV + ROPE)
    at = scores + (column * (2 * TILE))[:, None] + (place % (2 * TILE))[None, :]
    s = tl.load(at, mask=known[:, None] & (place >= 0)[None, :], other=0.0)
    inside = (place >= 0)[:, None] & (d < KV)[None, :]
    value = tl.load(latents + slot[:, None] + d[None, :], mask=inside, other=0.0)
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
