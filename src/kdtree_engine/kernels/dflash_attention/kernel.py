"""Flash decoding of draft blocks over paged context keys and values.

One program takes one request b, one KV head with a tile of the rows that read it, and one share
("split") of the pages that those rows may see. The rows are the block's L rows times the G query
heads of the KV head: row n is block row n // G under head kv * G + n % G. They lie on the narrow
side of the MMA, the 64 keys of a page on the wide one:

    S = K Q^T          [keys, rows] = [keys, hd] [hd, rows]
    O = O shrink + V^T exp2(S - max)   [hd, rows]

with the running maximum and the sum of the weights per row. Split 0 takes the block's own rows
too. `draft_combine` adds the splits: out = sum_s exp2(m_s - m) O_s / sum_s exp2(m_s - m) l_s.

    query [B, L, heads, hd], own keys and values [B, L, kv_heads, hd]; one stride a row each
    cache [pages, 64, 2, kv_heads, hd], keys then values; contexts [B] int32; table [B, P] int32
    sums [B, kv_heads, splits, L G, hd], tops and totals [B, kv_heads, splits, L G], float32
    out [B, L, heads, hd]

The softmax runs in base 2: `scale` is hd^-0.5 log2(e). Memory outside the visible context is never
loaded. The number of splits is the shape's; what each takes is the context's, so that the loops run
on the device and a graph holds for every context.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin, product

PAGE = tl.constexpr(64)
FAR = tl.constexpr(-1.0e30)  # the score of what is not seen; finite, so FAR - FAR is 0 and not NaN


@triton.jit
def share(context, WINDOW: tl.constexpr, SLIDING: tl.constexpr, SPLITS: tl.constexpr):
    """First visible position of row 0, its page, pages up to the context's end, pages a split.

    WINDOW and SLIDING are 0 where there is no such limit. Row 0 sees the farthest back of all.
    """
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first, context - WINDOW)
    if SLIDING > 0:
        first = tl.maximum(first, context - SLIDING + 1)
    first_page = first // PAGE
    count = tl.cdiv(context, PAGE) - first_page
    return first, first_page, count, tl.cdiv(count, SPLITS)


@triton.jit
def attend(top, total, acc, query, key, value, seen, scale, PRECISE: tl.constexpr):
    """One tile of keys [keys, hd] into the running softmax; seen [keys, rows]."""
    scores = product(key, query, tl.zeros(seen.shape, tl.float32), PRECISE) * scale
    scores = tl.where(seen, scores, FAR)
    higher = tl.maximum(top, tl.max(scores, 0))
    shrink = tl.exp2(top - higher)
    weights = tl.where(seen, tl.exp2(scores - higher[None, :]), 0.0)
    total = total * shrink + tl.sum(weights, 0)
    acc = product(tl.trans(value), weights.to(value.dtype), acc * shrink[None, :], PRECISE)
    return higher, total, acc


@triton.jit
def draft_partials(
    query,
    own_keys,
    own_values,
    cache,
    contexts,
    table,
    sums,
    tops,
    totals,
    query_stride,
    key_stride,
    value_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LENGTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SLIDING: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (splits, kv_heads * tiles, B). WIDTH, OWN: hd and L as powers of two of at least 16."""
    begin(PDL)
    split, batch = tl.program_id(0), tl.program_id(2)
    kv_head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    context = tl.load(contexts + batch)
    first, first_page, count, per = share(context, WINDOW, SLIDING, SPLITS)
    start = first_page + split * per
    stop = tl.minimum(start + per, first_page + count)
    if split > 0 and start >= stop:
        return

    n = tile * ROWS + tl.arange(0, ROWS)
    row, head = n // GROUP, kv_head * GROUP + n % GROUP
    d, k = tl.arange(0, WIDTH), tl.arange(0, PAGE)
    wide = d < HEAD_DIM
    real = n < LENGTH * GROUP
    q = tl.load(
        query + (batch * LENGTH + row)[None, :] * query_stride + head[None, :] * HEAD_DIM
        + d[:, None],
        mask=real[None, :] & wide[:, None],
        other=0.0,
    )  # fmt: skip
    top = tl.full((ROWS,), FAR, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((WIDTH, ROWS), tl.float32)

    if split == 0:
        own = tl.arange(0, OWN)
        inside = (own < LENGTH)[:, None] & wide[None, :]
        at = (batch * LENGTH + own)[:, None]
        column = (kv_head * HEAD_DIM + d)[None, :]
        key = tl.load(own_keys + at * key_stride + column, mask=inside, other=0.0)
        value = tl.load(own_values + at * value_stride + column, mask=inside, other=0.0)
        distance = row[None, :] - own[:, None]
        seen = (own < LENGTH)[:, None] & (distance < LENGTH)
        if CAUSAL:
            seen = seen & (distance >= 0)
        if SLIDING > 0:
            seen = seen & (distance < SLIDING) & (distance > -SLIDING)
        top, total, acc = attend(top, total, acc, q, key, value, seen, scale, PRECISE)

    token: tl.constexpr = 2 * KV_HEADS * HEAD_DIM  # elements of one token in the cache
    for page in tl.range(start, stop, num_stages=STAGES):
        place = tl.load(table + batch.to(tl.int64) * table_stride + page).to(tl.int64)
        base = cache + place * (PAGE * token) + kv_head * HEAD_DIM
        at = page * PAGE + k
        valid = (at >= first) & (at < context)
        inside = valid[:, None] & wide[None, :]
        offset = k[:, None] * token + d[None, :]
        key = tl.load(base + offset, mask=inside, other=0.0)
        value = tl.load(base + KV_HEADS * HEAD_DIM + offset, mask=inside, other=0.0)
        seen = valid[:, None] & (row >= 0)[None, :]
        if SLIDING > 0:
            seen = seen & (context + row[None, :] - at[:, None] < SLIDING)
        top, total, acc = attend(top, total, acc, q, key, value, seen, scale, PRECISE)

    part = ((batch * KV_HEADS + kv_head) * SPLITS + split) * (LENGTH * GROUP) + n
    tl.store(
        sums + part.to(tl.int64)[None, :] * HEAD_DIM + d[:, None],
        acc,
        mask=real[None, :] & wide[:, None],
    )
    tl.store(tops + part, top, mask=real)
    tl.store(totals + part, total, mask=real)


@triton.jit
def draft_combine(
    sums,
    tops,
    totals,
    contexts,
    out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LENGTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SLIDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (L * G, kv_heads, B): one row of one head. Only splits that had pages are read."""
    begin(PDL)
    n, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, count, per = share(tl.load(contexts + batch), WINDOW, SLIDING, SPLITS)
    used = tl.maximum(tl.cdiv(count, tl.maximum(per, 1)), 1)
    rows: tl.constexpr = LENGTH * GROUP
    base = (batch * KV_HEADS + kv_head) * SPLITS * rows + n
    c, d = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    wide = d < HEAD_DIM
    top = tl.full((1,), FAR, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, WIDTH), tl.float32)
    for chunk in tl.range(0, used, CHUNK):
        real = chunk + c < used
        part = base + (chunk + c) * rows
        m = tl.load(tops + part, mask=real, other=FAR)
        l = tl.load(totals + part, mask=real, other=0.0)  # noqa: E741
        a = tl.load(
            sums + part.to(tl.int64)[:, None] * HEAD_DIM + d[None, :],
            mask=real[:, None] & wide[None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(m, 0))
        shrink, weight = tl.exp2(top - higher), tl.exp2(m - higher)
        total = total * shrink + tl.sum(weight * l, 0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, None] * a, 0)[None, :]
        top = higher
    place = (batch * LENGTH + n // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + n % GROUP
    tl.store(
        out + place.to(tl.int64) * HEAD_DIM + d[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=wide[None, :],
    )
