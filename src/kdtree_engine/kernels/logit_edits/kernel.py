"""Edited logits of draft trees, and what a place remembers of its text.

    edit_kernel      a chunk of a row a program: every token by the place's own counts, then again
                     the few that lie in this chunk and on the row's path, then the ends of phrases
    remember_kernel  a place a program

The row's path changes the counts of at most 63 tokens. They are computed a second time from the
raw logit, with their whole count, and stored over the first result: twins on the path write the
same value. No multiplication may be fused with an addition: both kernels' launches and the
reference round each operation (enable_fp_fusion is off).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin

NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _edited(
    raw, word, extra, bias, repetition, frequency, presence, stop,
    IN_PROMPT: tl.constexpr, MOST_COUNTED: tl.constexpr,
):  # fmt: skip
    """Logits `raw` of tokens with these words, on the path `extra` times more; see the operator.

    stop: the bit of a word that forbids the token, or 0.
    """
    count = (word & MOST_COUNTED) + extra
    x = raw
    if repetition != 1.0:
        scaled = tl.where(raw > 0, tl.div_rn(raw, repetition), raw * repetition)
        x = tl.where((count > 0) | ((word & IN_PROMPT) != 0), scaled, raw)
    if frequency != 0.0:
        x = tl.where(count > 0, x - frequency * count.to(tl.float32), x)
    if presence != 0.0:
        x = tl.where(count > 0, x - presence, x)
    x = tl.where(bias != 0, x + bias, x)
    forbidden = (bias == NEVER) | ((word & stop) != 0)
    return tl.where(_finite(raw), tl.where(forbidden, NEVER, x), raw)


@triton.jit
def _latest(
    recent, tokens, depths, mine, depth, N,
    NP: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """[LENGTH] int32: the s-th latest token before what the row chooses, s from 1 on; -1 at 0.

    recent, tokens, depths: of this place and tree; mine, depth: the row's ancestors and depth.
    """
    back = tl.arange(0, LENGTH)
    latest = tl.load(recent + back - 1 - depth, mask=back > depth, other=-1)
    if NP > 1:
        node = tl.arange(0, NP)
        on = (node > 0) & (node < N) & (((mine >> node) & 1) == 1)
        name = tl.load(tokens + node, mask=on, other=-1).to(tl.int32)
        height = tl.load(depths + node, mask=on, other=-1)
        there = on[:, None] & (height[:, None] == depth + 1 - back[None, :])
        own = tl.sum(tl.where(there, name[:, None], 0), 0)
        latest = tl.where((back > 0) & (back <= depth), own, latest)
    return latest


@triton.jit
def edit_kernel(
    logits,  # [B N, vocab] float32, rows `stride` apart
    out,  # [B N, vocab] float32, output
    words,  # [P, vocab] int32, from here on the fields of EditState
    bias,  # [P, vocab] float32
    repetition,  # [P] float32
    frequency,  # [P] float32
    presence,  # [P] float32
    quiet,  # [P] int32
    recent,  # [P, LENGTH - 1] int32
    phrases,  # [P, PHRASES, LENGTH] int32
    active,  # [P] bool
    places,  # [B] int64
    tokens,  # [B, N] int64
    ancestors,  # [B, N] int64
    depths,  # [B, N] int64
    vocab,
    stride,
    N,
    CHUNK: tl.constexpr,
    NP: tl.constexpr,  # a power of two from N on
    PHRASES: tl.constexpr,
    LENGTH: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    IS_STOP: tl.constexpr,
    MOST_COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B N, chunks)."""
    begin(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    tree = row // N
    logits, out = logits + row * stride, out + row * vocab
    token = first + tl.arange(0, CHUNK)
    inside = token < vocab
    raw = tl.load(logits + token, mask=inside, other=0.0)
    place = tl.load(places + tree)
    if tl.load(active + place) == 0:
        tl.store(out + token, raw, mask=inside)
    else:
        words, bias = words + place * vocab, bias + place * vocab
        tokens, depths = tokens + tree * N, depths + tree * N
        mine, depth = tl.load(ancestors + row), tl.load(depths + row - tree * N)
        r, f = tl.load(repetition + place), tl.load(frequency + place)
        p = tl.load(presence + place)
        stop = tl.where(tl.load(quiet + place) > depth, IS_STOP, 0)
        counts = (r != 1.0) | (f != 0.0) | (p != 0.0)
        read = tl.where(counts | (stop != 0), vocab, 0)
        word = tl.load(words + token, mask=token < read, other=0)
        added = tl.load(bias + token, mask=inside, other=0.0)
        value = _edited(raw, word, 0, added, r, f, p, stop, IN_PROMPT, MOST_COUNTED)
        tl.store(out + token, value, mask=inside)
        end = tl.minimum(first + CHUNK, vocab)

        if NP > 1:
            node, rival = tl.arange(0, NP), tl.arange(0, NP)[None, :]
            on = (node > 0) & (node < N) & (((mine >> node) & 1) == 1)
            name = tl.load(tokens + node, mask=on, other=-1)
            here = (name >= first) & (name < end)
            if counts & (tl.max(here.to(tl.int32), 0) > 0):
                facing = (rival > 0) & (rival < N) & (((mine >> rival) & 1) == 1)
                other = tl.load(tokens + rival, mask=facing, other=-1)
                extra = tl.sum((other == name[:, None]).to(tl.int32), 1)
                again = _edited(
                    tl.load(logits + name, mask=here, other=0.0),
                    tl.load(words + name, mask=here, other=0),
                    extra,
                    tl.load(bias + name, mask=here, other=0.0),
                    r, f, p, stop, IN_PROMPT, MOST_COUNTED,
                )  # fmt: skip
                tl.debug_barrier()  # the first results are stored
                tl.store(out + name, again, mask=here)

        phrase = phrases + (place * PHRASES + tl.arange(0, PHRASES)) * LENGTH
        last = tl.load(phrase)
        ends = (last >= first) & (last < end)
        if tl.max(ends.to(tl.int32), 0) > 0:
            back = tl.arange(0, LENGTH)[None, :]
            latest = _latest(
                recent + place * (LENGTH - 1), tokens, depths, mine, depth, N, NP, LENGTH
            )
            given = tl.load(phrase[:, None] + back)
            agree = (back == 0) | (given < 0) | (given == latest[None, :])
            hit = ends & (tl.min(agree.to(tl.int32), 1) > 0)
            hit = hit & _finite(tl.load(logits + last, mask=hit, other=0.0))
            tl.debug_barrier()  # all other results are stored
            tl.store(out + last, tl.full([PHRASES], NEVER, tl.float32), mask=hit)


@triton.jit
def remember_kernel(
    words,  # [P, vocab] int32, like the next three a field of EditState
    quiet,  # [P] int32
    recent,  # [P, LENGTH - 1] int32
    active,  # [P] bool
    places,  # [B] int64
    emitted,  # [B, L] int64
    lengths,  # [B] int64
    vocab,
    L,
    MOST: tl.constexpr,  # a power of two from L on
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    place, length = tl.load(places + row), tl.load(lengths + row)
    emitted = emitted + row * L
    if (length > 0) & (tl.load(active + place) != 0):
        step = tl.arange(0, MOST)
        token = tl.load(emitted + step, mask=(step < length) & (step < L), other=-1)
        inside = (token >= 0) & (token < vocab)
        tl.atomic_add(words + place * vocab + token, 1, mask=inside, sem="relaxed")
        recent = recent + place * (LENGTH - 1)
        back = tl.arange(0, LENGTH)
        kept = back < LENGTH - 1
        old = tl.load(recent + back - length, mask=kept & (back >= length), other=-1)
        fresh = tl.load(emitted + length - 1 - back, mask=kept & (back < length), other=-1)
        left = tl.load(quiet + place) - length
        tl.debug_barrier()  # all that is overwritten has been read
        value = tl.where(back < length, fresh, old.to(tl.int64)).to(tl.int32)
        tl.store(recent + back, value, mask=kept)
        tl.store(quiet + place, left.to(tl.int32))
