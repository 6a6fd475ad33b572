"""Kernels of absorbed latent attention over a span table; one order of summation for every row.

query [R, HEADS, D], latents [slots, D], D = KV + ROPE: a key is its whole latent row, its value
the first KV entries. A span of N rows has N * HEADS columns; keys are the M operand of the MMA and
columns its narrow side. Scores are base-2 logarithms: scale holds log2(e).

The order that fixes the bits: tiles of 64 keys at absolute positions; inside a unit (UNIT tiles)
the online recurrence

    top = max(m, max_k s_k),  w = round(exp2(s - top)),  n = n exp2(m - top) + sum w,
    a = a exp2(m - top) + sum w v,  m = top

with both sums in the MMA (n as a product with ones, since tl.sum would follow the layout); units
folded left in order inside groups (GROUP units), groups folded left in order:

    fold(M, L, A; m, n, a):  top = max(M, m),  x = exp2(M - top),  y = exp2(m - top),
    L = fma(L, x, n y),  A = fma(A, x, a y),  M = top

No key gives (m, n, a) = (LOWEST, 0, 0), and folding that changes nothing. So a program may take
one unit or one group, and `combine` finishes: which of the two is a question of speed alone.

Parts of a span with `units` units in pages: while units <= limit each unit is a part; beyond, each
complete group is one, and the units after the last complete group follow. A tree row's last units,
from context // (64 UNIT) on, are the row's own (its tail): at most 127 committed keys and its
ancestors, gathered so that position q lies at offset q % 64 of tile q // 64. They are the last two
parts, TAIL + 0 and TAIL + 1, of the row's columns.

values [parts, R * HEADS, KV], high and mass [parts, R * HEADS] float32 hold A, M and L of a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin, product

TILE = tl.constexpr(64)
LOWEST = tl.constexpr(-1e30)  # finite, so that no difference of maxima is NaN


@triton.jit
def fold(high, mass, values, m, n, a):
    """Left fold of one partial result into another; explicit fma, so that all kernels round alike.

    high, mass [C], values [V, C], and m, n, a likewise.
    """
    top = tl.maximum(high, m)
    x, y = tl.exp2(high - top), tl.exp2(m - top)
    values = tl.fma(values, tl.broadcast_to(x[None, :], values.shape), a * y[None, :])
    return top, tl.fma(mass, x, n * y), values


@triton.jit
def groups_of(units, limit, GROUP: tl.constexpr):
    """How many leading groups of a span are parts as a whole."""
    return tl.where(units > limit, units // GROUP, 0)


@triton.jit
def load_query(
    query, column, known, KV: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, E: tl.constexpr
):
    """Columns [C] of the query as [V, C] and [E, C], zero where padded."""
    d, e = tl.arange(0, V), tl.arange(0, E)
    at = query + column[None, :].to(tl.int64) * (KV + ROPE)
    latent = tl.load(at + d[:, None], mask=known[None, :] & (d < KV)[:, None], other=0.0)
    rope = tl.load(at + KV + e[:, None], mask=known[None, :] & (e < ROPE)[:, None], other=0.0)
    return latent, rope


@triton.jit
def load_keys(
    start,
    offset,
    wanted,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows at start + offset [64] as [64, V] and [64, E]; zero where not wanted (may be NaN)."""
    d, e = tl.arange(0, V), tl.arange(0, E)
    at = start + offset[:, None]
    if MASKED or V != KV or E != ROPE:
        latent = tl.load(at + d[None, :], mask=wanted[:, None] & (d < KV)[None, :], other=0.0)
        rope = tl.load(at + KV + e[None, :], mask=wanted[:, None] & (e < ROPE)[None, :], other=0.0)
    else:
        latent, rope = tl.load(at + d[None, :]), tl.load(at + KV + e[None, :])
    return latent, rope


@triton.jit
def load_values(
    start,
    offset,
    wanted,
    latent,
    slice,
    KV: tl.constexpr,
    V: tl.constexpr,
    SPLIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The slice of the values that this program adds up, [64, V / SPLIT]."""
    if SPLIT == 1:
        return latent
    else:
        d = slice * (V // SPLIT) + tl.arange(0, V // SPLIT)
        at = start + offset[:, None] + d[None, :]
        if MASKED or V != KV:
            return tl.load(at, mask=wanted[:, None] & (d < KV)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def add_tile(
    latent,
    rope,
    value,
    q_latent,
    q_rope,
    visible,
    scale,
    fresh,
    m,
    n,
    a,
    MASKED: tl.constexpr,
    APART: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """One tile of the recurrence; `fresh` where the tile begins a unit. n is [16, C], rows alike.

    visible [64, C]; a key that is not has weight exactly 0. s * scale only meets a maximum, and
    the exponent is an explicit fma: no variant can round otherwise.
    """
    s = tl.zeros([TILE, q_latent.shape[1]], tl.float32)
    if APART:
        # Always true, and two different conditions, so that they are not merged. A product whose
        # result feeds another in the same block gets all warps along M: with 8 warps both warp
        # groups would compute the same 64 x C scores. Behind a branch each takes half of C.
        if scale > 0.0:
            s = product(latent, q_latent, s, PRECISE)
        if scale < -LOWEST:
            s = product(rope, q_rope, s, PRECISE)
    else:
        s = product(latent, q_latent, s, PRECISE)
        s = product(rope, q_rope, s, PRECISE)
    m = tl.where(fresh, LOWEST, m)
    scaled = s * scale
    if MASKED:
        scaled = tl.where(visible, scaled, LOWEST)
    top = tl.maximum(m, tl.max(scaled, 0))
    shift = tl.broadcast_to(-top[None, :], s.shape)
    power = tl.fma(s, tl.full(s.shape, 0.0, tl.float32) + scale, shift)
    if MASKED:
        power = tl.where(visible, power, LOWEST)
    weight = tl.exp2(power).to(latent.dtype)
    shrink = tl.where(fresh, 0.0, tl.exp2(m - top))
    ones = tl.full([16, TILE], 1.0, latent.dtype)
    n = product(ones, weight, n * shrink[None, :], PRECISE)
    a = product(tl.trans(value), weight, a * shrink[None, :], PRECISE)
    return top, n, a


@triton.jit
def store_part(
    values,
    high,
    mass,
    part,
    columns,
    column,
    known,
    slice,
    M,
    L,
    A,
    KV: tl.constexpr,
    V: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Write a part's result for columns [C]: A [V / SPLIT, C], and M and L [C] once."""
    d = slice * (V // SPLIT) + tl.arange(0, V // SPLIT)
    at = column.to(tl.int64) + part * columns
    tl.store(values + at[None, :] * KV + d[:, None], A, mask=known[None, :] & (d < KV)[:, None])
    first = known & (slice == 0)
    tl.store(high + at, M, mask=first)
    tl.store(mass + at, L, mask=first)


@triton.jit
def shared_parts(
    query,
    latents,
    contexts,
    pages,
    values,
    high,
    mass,
    scale,
    limit,
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
    CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    APART: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Parts chunk, chunk + chunks, ... of one span, for one tile of its columns."""
    tiles = tl.cdiv(count * HEADS, COLUMNS)
    slice = index % SPLIT
    tile = index // SPLIT % tiles
    chunk = index // (SPLIT * tiles) % chunks
    span = index // (SPLIT * tiles * chunks)
    context = tl.load(contexts + span)
    inside = tile * COLUMNS + tl.arange(0, COLUMNS)
    known = inside < count * HEADS
    column = span * count * HEADS + inside
    position = context + first + inside // HEADS  # of a causal run's rows
    last = context + first + (tl.minimum(tile * COLUMNS + COLUMNS, count * HEADS) - 1) // HEADS
    if CAUSAL:
        units = tl.cdiv(context + first + count, UNIT * TILE)
        seen = last // (UNIT * TILE) + 1  # units that any of these columns sees
    else:
        units = context // (UNIT * TILE)
        seen = units
    groups = groups_of(units, limit, GROUP)
    whole = tl.minimum(groups, tl.cdiv(seen, GROUP))
    parts = whole + tl.maximum(seen - groups * GROUP, 0)
    q_latent, q_rope = load_query(query, column, known & (chunk < parts), KV, ROPE, V, E)
    k = tl.arange(0, TILE)
    offset = k * (KV + ROPE)
    for part in range(chunk, parts, chunks):
        unit = tl.where(part < groups, part * GROUP, part + groups * (GROUP - 1))
        end = tl.minimum(tl.where(part < groups, unit + GROUP, unit + 1), seen)
        M = tl.full([COLUMNS], LOWEST, tl.float32)
        L = tl.zeros([COLUMNS], tl.float32)
        A = tl.zeros([V // SPLIT, COLUMNS], tl.float32)
        m, n = M, tl.zeros([16, COLUMNS], tl.float32)
        a = A
        for t in tl.range(unit * UNIT, end * UNIT, num_stages=STAGES):
            key = t * TILE + k
            wanted = key <= last
            page = tl.load(pages + span.to(tl.int64) * width + t, mask=t < width, other=0)
            start = latents + page.to(tl.int64) * (TILE * (KV + ROPE))
            latent, rope = load_keys(start, offset, wanted, KV, ROPE, V, E, CAUSAL)
            value = load_values(start, offset, wanted, latent, slice, KV, V, SPLIT, CAUSAL)
            visible = (key[:, None] <= position[None, :]) & known[None, :]
            m, n, a = add_tile(
                latent,
                rope,
                value,
                q_latent,
                q_rope,
                visible,
                scale,
                t % UNIT == 0,
                m,
                n,
                a,
                CAUSAL,
                APART,
                PRECISE,
            )
            if t % UNIT == UNIT - 1:
                M, L, A = fold(M, L, A, m, tl.max(n, 0), a)
        store_part(values, high, mass, part, columns, column, known, slice, M, L, A, KV, V, SPLIT)


@triton.jit
def ancestor_rows(ancestors, row, count):
    """Of a tree row: its ancestors in order of depth, as (on [64], rank [64], how many).

    on: whether row j of the span is one; rank: how many come before it.
    """
    j = tl.arange(0, 64)
    bits = tl.load(ancestors + row)
    on = ((bits >> j.to(tl.int64)) & 1).to(tl.int32)
    on = tl.where(j < count, on, 0)
    return on, tl.cumsum(on, 0) - on, tl.sum(on, 0)


@triton.jit
def tail_part(
    query,
    latents,
    slots,
    contexts,
    pages,
    ancestors,
    values,
    high,
    mass,
    scale,
    count,
    columns,
    width,
    tail,
    index,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    APART: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """One of a tree row's two last units, for one tile of its heads: keys gathered by address."""
    tiles: tl.constexpr = (HEADS + COLUMNS - 1) // COLUMNS
    slice = index % SPLIT
    head = index // SPLIT % tiles * COLUMNS + tl.arange(0, COLUMNS)
    which = index // (SPLIT * tiles) % 2
    row = index // (SPLIT * tiles * 2)
    span = row // count
    context = tl.load(contexts + span)
    on, rank, depth = ancestor_rows(ancestors, row, count)
    j = tl.arange(0, 64)
    own = tl.load(slots + span * count + j, mask=on != 0, other=0)
    known = head < HEADS
    column = row * HEADS + head
    start = (context // (UNIT * TILE) + which) * UNIT * TILE
    length = context + depth
    q_latent, q_rope = load_query(query, column, known & (start < length), KV, ROPE, V, E)
    k = tl.arange(0, TILE)
    m = tl.full([COLUMNS], LOWEST, tl.float32)
    n = tl.zeros([16, COLUMNS], tl.float32)
    a = tl.zeros([V // SPLIT, COLUMNS], tl.float32)
    end = tl.minimum(tl.cdiv(length, TILE) * TILE, start + UNIT * TILE)
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        key = first + k
        wanted = key < length
        committed = key < context
        page = tl.load(
            pages + span.to(tl.int64) * width + first // TILE,
            mask=(first < context) & (first < width * TILE),
            other=0,
        )
        mine = (on[None, :] != 0) & (rank[None, :] == (key - context)[:, None])
        gathered = tl.sum(tl.where(mine, own[None, :], 0), 1)
        slot = tl.where(committed, page.to(tl.int64) * TILE + k, gathered)
        offset = slot * (KV + ROPE)
        latent, rope = load_keys(latents, offset, wanted, KV, ROPE, V, E, True)
        value = load_values(latents, offset, wanted, latent, slice, KV, V, SPLIT, True)
        visible = wanted[:, None] & known[None, :]
        m, n, a = add_tile(
            latent,
            rope,
            value,
            q_latent,
            q_rope,
            visible,
            scale,
            first == start,
            m,
            n,
            a,
            True,
            APART,
            PRECISE,
        )
    known = known & (start < length)
    store_part(
        values,
        high,
        mass,
        tail + which,
        columns,
        column,
        known,
        slice,
        m,
        tl.max(n, 0),
        a,
        KV,
        V,
        SPLIT,
    )


@triton.jit(do_not_specialize=["limit", "first", "count", "chunks", "shared", "tail"])
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
    scale,
    limit,
    first,
    count,
    columns,
    width,
    chunks,
    shared,
    tail,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAIL_COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    APART: tl.constexpr,
    PRECISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs 0..shared-1 take parts in pages, for all rows; the rest one tail unit each.

    query [S * count, HEADS, D], slots [S * count] int64, contexts [S], pages [S, width] int32,
    ancestors [S * count] int64 (unused if CAUSAL); first: rows of a causal run before these.
    """
    begin(PDL)
    index = tl.program_id(0)
    if index < shared:
        shared_parts(
            query,
            latents,
            contexts,
            pages,
            values,
            high,
            mass,
            scale,
            limit,
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
            CAUSAL,
            COLUMNS,
            SPLIT,
            UNIT,
            GROUP,
            STAGES,
            APART,
            PRECISE,
        )
    elif TAIL_COLUMNS > 0:
        tail_part(
            query,
            latents,
            slots,
            contexts,
            pages,
            ancestors,
            values,
            high,
            mass,
            scale,
            count,
            columns,
            width,
            tail,
            index - shared,
            HEADS,
            KV,
            ROPE,
            V,
            E,
            TAIL_COLUMNS,
            SPLIT,
            UNIT,
            STAGES,
            APART,
            PRECISE,
        )


@triton.jit
def read_part(values, high, mass, part, columns, column, known, d, KV: tl.constexpr):
    """A part's (M, L, A) for one column, [1], [1], [WIDTH, 1]; no key's where not known."""
    at = column.to(tl.int64) + part * columns + tl.arange(0, 1)
    m = tl.load(high + at, mask=known, other=LOWEST)
    n = tl.load(mass + at, mask=known, other=0.0)
    a = tl.load(values + at[None, :] * KV + d[:, None], mask=known & (d < KV)[:, None], other=0.0)
    return m, n, a


@triton.jit(do_not_specialize=["limit", "first", "count", "tail"])
def combine(
    values,
    high,
    mass,
    out,
    contexts,
    ancestors,
    limit,
    first,
    count,
    columns,
    tail,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    BATCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """WIDTH values of one column: its parts folded in order and divided; out [R * HEADS, KV].

    Loops take BATCH groups at once and read them before they add. The barrier keeps the assembler
    from moving the loads down to their uses, so all of them are in flight together; it needs a
    block of two warps, since in one it is no instruction.
    """
    begin(PDL)
    column = tl.program_id(0)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = column // HEADS
    span = row // count
    context = tl.load(contexts + span)
    if CAUSAL:
        units = tl.cdiv(context + first + count, UNIT * TILE)
        length = context + first + row + 1
    else:
        units = context // (UNIT * TILE)
        _, _, depth = ancestor_rows(ancestors, row, count)
        length = context + depth
    seen = tl.cdiv(length, UNIT * TILE)
    groups = groups_of(units, limit, GROUP)
    whole = tl.minimum(groups, tl.cdiv(seen, GROUP))
    M = tl.full([1], LOWEST, tl.float32)
    L = tl.zeros([1], tl.float32)
    A = tl.zeros([WIDTH, 1], tl.float32)
    for start in range(0, whole, BATCH * GROUP):
        read = ()
        for i in tl.static_range(BATCH * GROUP):
            part = start + i
            read += (read_part(values, high, mass, part, columns, column, part < whole, d, KV),)
        tl.debug_barrier()
        for i in tl.static_range(BATCH * GROUP):
            M, L, A = fold(M, L, A, read[i][0], read[i][1], read[i][2])
    for start in range(groups * GROUP, seen, BATCH * GROUP):
        read = ()
        for i in tl.static_range(BATCH * GROUP):
            unit = start + i
            part = tl.where(unit < units, unit - groups * (GROUP - 1), tail + unit - units)
            read += (read_part(values, high, mass, part, columns, column, unit < seen, d, KV),)
        tl.debug_barrier()
        for g in tl.static_range(BATCH):
            m, n, a = read[g * GROUP]
            for i in tl.static_range(1, GROUP):
                more = read[g * GROUP + i]
                m, n, a = fold(m, n, a, more[0], more[1], more[2])
            M, L, A = fold(M, L, A, m, n, a)
    result = tl.where(L[None, :] > 0.0, A / L[None, :], 0.0)  # a row that sees nothing gives 0
    at = out + (column.to(tl.int64) * KV + d)[:, None] + tl.arange(0, 1)[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(d < KV)[:, None])
