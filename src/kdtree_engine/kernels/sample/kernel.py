"""One token a row: greedy, or the best perturbed token that the row's filters keep.

    largest_kernel  a chunk a program: its largest logit, the first place of it, and the largest of
                    each run of SUB logits
    perturb_kernel  a chunk a program, sampled rows only: the best perturbed token without filters,
                    and, where top-p is on, the chunk's mass
    choose_kernel   a row a program: both reduced, then the filters

    x = (logit - max) / T, score = x + noise, both float32; mass = floor(exp(x) 2^44), int64

What decides is a comparison of float32 scores or an integer sum, exact in any order. The float64
noise is computed only for tokens whose approximate score is within MARGIN = 2^-14 of the best one
seen. The approximation is off by under half of that where it matters, at |x| < 27: by 2^-16 of
noise, 3 x 2^-24 x 27 < 2^-17.6 of x by a product, and 2^-18 of rounding the sums. So no other token
can be the best. FLOOR: the likeliest token has x = 0 and noise of -3.14 at least and is kept by
every filter, so nothing below wins.

Filters keep all tokens above a level of x. A pick that they reject is replaced by the best among
the strictly likelier tokens. These lie in the runs whose largest logit is strictly likelier, which
are listed and gathered, ROWS runs at a time: a few tiles instead of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.gumbel.kernel import approximate, exact_at
from kdtree_engine.kernels.gumbel.kernel import words as random_words
from kdtree_engine.kernels.prologue import begin

NOWHERE = tl.constexpr(2147483647)
INFINITY_BITS = tl.constexpr(0x7F800000)
FLOOR = tl.constexpr(-3.2)
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _first(mask, token):
    """The smallest of `token` [a, b] where mask, NOWHERE if none."""
    return tl.min(tl.min(tl.where(mask, token, NOWHERE), 1), 0)


@triton.jit
def _sum(x):
    """The sum of integers [a, b]."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _mass(x):
    """floor(exp(x) 2^44) as int64."""
    return (tl.exp(x.to(tl.float64)) * 17592186044416.0).to(tl.int64)


@triton.jit
def _depth(x):
    """|x| as int32 bits: x <= 0, so rising bits are falling x."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _best_exact(score, token, logits, top, heat, seed, position, best, pick, MARGIN: tl.constexpr):
    """(best, pick) against the tokens [a, b] of approximate scores; equal scores: the smaller."""
    limit = tl.max(tl.max(score, 1), 0) - MARGIN
    limit = tl.maximum(tl.maximum(limit, best - MARGIN), FLOOR)
    near = score >= limit
    here = _first(near, token)
    while here < NOWHERE:
        x = tl.div_rn(tl.load(logits + here) - top, heat)
        value = x + exact_at(seed, position, here)
        better = (value > best) | ((value == best) & (here < pick))
        best = tl.where(better, value, best)
        pick = tl.where(better, here, pick)
        here = _first(near & (token > here), token)
    return best, pick


@triton.jit
def largest_kernel(
    logits,  # [R, vocab] float32, rows `stride` apart
    chunk_max,  # [R, chunks] float32; NaN counts as +inf
    chunk_first,  # [R, chunks] int32
    run_max,  # [R, chunks x RUNS] float32
    vocab,
    stride,
    RUNS: tl.constexpr,  # a chunk is RUNS x SUB tokens
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, R)."""
    begin(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    run = chunk * RUNS + tl.arange(0, RUNS)
    token = run[:, None] * SUB + tl.arange(0, SUB)[None, :]
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=NEVER)
    value = tl.where(value == value, value, float("inf"))
    tops = tl.max(value, 1)
    top = tl.max(tops, 0)
    chunks = tl.num_programs(0)
    tl.store(run_max + row * chunks * RUNS + run, tops)
    tl.store(chunk_max + row * chunks + chunk, top)
    tl.store(chunk_first + row * chunks + chunk, _first(value == top, token))


@triton.jit
def perturb_kernel(
    logits,  # [R, vocab] float32
    temperature,  # [R] float32
    top_p,  # [R] float32
    seeds,  # [R] int64
    positions,  # [R] int64
    chunk_max,  # [R, chunks] float32
    chunk_score,  # [R, chunks] float32, from here on outputs, of sampled rows only
    chunk_pick,  # [R, chunks] int32
    chunk_mass,  # [R, chunks] int64, where top_p < 1
    vocab,
    stride,
    CHUNKS: tl.constexpr,  # a power of two from the number of chunks on
    RUNS: tl.constexpr,
    SUB: tl.constexpr,
    MARGIN: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, R)."""
    begin(PDL)
    row, chunk, chunks = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    heat = tl.load(temperature + row)
    if heat > 0:
        part = tl.arange(0, CHUNKS)
        tops = tl.load(chunk_max + row * chunks + part, mask=part < chunks, other=NEVER)
        top = tl.max(tops, 0)
        if (top > NEVER) & (top < float("inf")):
            logits += row * stride
            run = chunk * RUNS + tl.arange(0, RUNS)
            token = run[:, None] * SUB + tl.arange(0, SUB)[None, :]
            value = tl.load(logits + token, mask=token < vocab, other=NEVER)
            if (heat > 1e-30) & (heat < 1e30):  # a division costs as much as the rest of the noise
                x = (value - top) * tl.div_rn(tl.full((), 1.0, tl.float32), heat)
            else:
                x = tl.div_rn(value - top, heat)
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            blocks = run[:, None] * (SUB // 4) + tl.arange(0, SUB // 4)[None, :]
            score = x + approximate(random_words(seed, position, blocks), FAST)
            best, pick = tl.full((), NEVER, tl.float32), tl.full((), NOWHERE, tl.int32)
            best, pick = _best_exact(
                score, token, logits, top, heat, seed, position, best, pick, MARGIN
            )
            tl.store(chunk_score + row * chunks + chunk, best)
            tl.store(chunk_pick + row * chunks + chunk, pick)
            if tl.load(top_p + row) < 1.0:
                mass = _sum(_mass(tl.div_rn(value - top, heat)))
                tl.store(chunk_mass + row * chunks + chunk, mass)


@triton.jit
def _list(listing, wanted, RUNS: tl.constexpr):
    """Write the numbers of the wanted runs [RUNS] to `listing`, rising; their count."""
    flag = wanted.to(tl.int32)
    tl.debug_barrier()  # the list before has been read
    tl.store(listing + tl.cumsum(flag, 0) - 1, tl.arange(0, RUNS), mask=wanted)
    tl.debug_barrier()
    return tl.sum(flag, 0)


@triton.jit
def _tile(logits, listing, first, count, top, heat, vocab, ROWS: tl.constexpr, SUB: tl.constexpr):
    """Runs [ROWS], tokens and x [ROWS, SUB] of the listed runs from number `first` on.

    Beyond the list and the vocabulary x is -inf.
    """
    number = first + tl.arange(0, ROWS)
    run = tl.load(listing + number, mask=number < count, other=0)
    token = run[:, None] * SUB + tl.arange(0, SUB)[None, :]
    inside = (number < count)[:, None] & (token < vocab)
    value = tl.load(logits + token, mask=inside, other=NEVER)
    return run, token, tl.div_rn(value - top, heat)


@triton.jit
def _above(
    logits, listing, count, level, top, heat, vocab, by_mass, ROWS: tl.constexpr, SUB: tl.constexpr
):
    """Number of tokens with x > level, and their mass where `by_mass`."""
    number, mass = count * 0, count.to(tl.int64) * 0
    first = count * 0
    while first < count:
        _, _, x = _tile(logits, listing, first, count, top, heat, vocab, ROWS, SUB)
        above = x > level
        number += _sum(above.to(tl.int32))
        if by_mass:
            mass += _sum(tl.where(above, _mass(x), 0))
        first += ROWS
    return number, mass


@triton.jit
def _kept_mass(
    logits, listing, run_x, runs, top, heat, vocab, k,
    RUNS: tl.constexpr, ROWS: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Mass of the tokens that top-k leaves: all down to the k-th largest x, 0 < k < vocab.

    The k-th largest x is no less than the k-th largest run's. Both are found bit by bit: the
    largest bits that fewer than k lie below.
    """
    depth = tl.where(tl.arange(0, RUNS) < runs, _depth(run_x), NOWHERE)
    bound = runs * 0 + INFINITY_BITS
    if k <= runs:
        bound = runs * 0
        for step in range(31):
            trial = bound | (1 << (30 - step))
            bound = tl.where(tl.sum((depth < trial).to(tl.int32), 0) < k, trial, bound)
    count = _list(listing, depth <= bound, RUNS)
    level = runs * 0
    for step in range(31):
        trial = level | (1 << (30 - step))
        below = runs * 0
        first = count * 0
        while first < count:
            _, _, x = _tile(logits, listing, first, count, top, heat, vocab, ROWS, SUB)
            below += _sum((_depth(x) < trial).to(tl.int32))
            first += ROWS
        level = tl.where(below < k, trial, level)
    mass = count.to(tl.int64) * 0
    first = count * 0
    while first < count:
        _, _, x = _tile(logits, listing, first, count, top, heat, vocab, ROWS, SUB)
        mass += _sum(tl.where(_depth(x) <= level, _mass(x), 0))
        first += ROWS
    return mass


@triton.jit
def _next_pick(
    logits, listing, count, level, top, heat, vocab, seed, position,
    ROWS: tl.constexpr, SUB: tl.constexpr, MARGIN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The best perturbed token with x > level."""
    best, pick = tl.full((), NEVER, tl.float32), tl.full((), NOWHERE, tl.int32)
    first = count * 0
    while first < count:
        run, token, x = _tile(logits, listing, first, count, top, heat, vocab, ROWS, SUB)
        blocks = run[:, None] * (SUB // 4) + tl.arange(0, SUB // 4)[None, :]
        score = x + approximate(random_words(seed, position, blocks), FAST)
        score = tl.where(x > level, score, NEVER)
        best, pick = _best_exact(
            score, token, logits, top, heat, seed, position, best, pick, MARGIN
        )
        first += ROWS
    return pick


@triton.jit
def _descend(
    logits, run_max, listing, chunk_mass, pick, top, heat, k, p, q, seed, position,
    vocab, chunks, runs,
    CHUNKS: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr, SUB: tl.constexpr,
    MARGIN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """From the best token without filters to the best one that they keep."""
    by_count, by_mass = (k > 0) & (k < vocab), p < 1.0
    run = tl.arange(0, RUNS)
    run_x = tl.load(run_max + run, mask=run < runs, other=NEVER)
    run_x = tl.div_rn(run_x - top, heat)
    total = k * 0
    if by_mass:
        if by_count:
            total = _kept_mass(logits, listing, run_x, runs, top, heat, vocab, k, RUNS, ROWS, SUB)
        else:
            part = tl.arange(0, CHUNKS)
            total = tl.sum(tl.load(chunk_mass + part, mask=part < chunks, other=0), 0)
    limit = tl.maximum(p.to(tl.float64) * total.to(tl.float64), 1.0)
    searching = runs * 0 + 1
    while searching != 0:
        level = tl.div_rn(tl.load(logits + pick) - top, heat)
        count = _list(listing, run_x > level, RUNS)
        number, mass = _above(logits, listing, count, level, top, heat, vocab, by_mass, ROWS, SUB)
        fails = (by_count & (number >= k)) | (by_mass & (mass.to(tl.float64) >= limit))
        fails = fails | (tl.exp(level.to(tl.float64)) < q.to(tl.float64))
        searching = (fails & (number > 0)).to(tl.int32)
        if searching != 0:
            pick = _next_pick(
                logits, listing, count, level, top, heat, vocab, seed, position,
                ROWS, SUB, MARGIN, FAST,
            )  # fmt: skip
    return pick


@triton.jit
def choose_kernel(
    logits,  # [R, vocab] float32, rows `stride` apart
    temperature,  # [R] float32
    top_k,  # [R] int64
    top_p,  # [R] float32
    min_p,  # [R] float32
    seeds,  # [R] int64
    positions,  # [R] int64
    chunk_max,  # [R, chunks] float32
    chunk_first,  # [R, chunks] int32
    run_max,  # [R, runs] float32
    chunk_score,  # [R, chunks] float32
    chunk_pick,  # [R, chunks] int32
    chunk_mass,  # [R, chunks] int64
    listing,  # [R, runs] int32, scratch
    tokens,  # [R] int64, outputs
    finite,  # [R] bool
    vocab,
    stride,
    chunks,
    runs,
    CHUNKS: tl.constexpr,  # powers of two from chunks and runs on
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,  # runs a tile
    SUB: tl.constexpr,
    MARGIN: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, CHUNKS)
    inside = part < chunks
    here = row * chunks + part
    tops = tl.load(chunk_max + here, mask=inside, other=NEVER)
    places = tl.load(chunk_first + here, mask=inside, other=NOWHERE)
    top = tl.max(tops, 0)
    pick = tl.min(tl.where(tops == top, places, NOWHERE), 0)
    good = (top > NEVER) & (top < float("inf"))
    heat = tl.load(temperature + row)
    if good & (heat > 0):
        scores = tl.load(chunk_score + here, mask=inside, other=NEVER)
        picks = tl.load(chunk_pick + here, mask=inside, other=NOWHERE)
        pick = tl.min(tl.where(scores == tl.max(scores, 0), picks, NOWHERE), 0)
        k, p, q = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        if ((k > 0) & (k < vocab)) | (p < 1.0) | (q > 0.0):
            pick = _descend(
                logits + row * stride, run_max + row * runs, listing + row * runs,
                chunk_mass + row * chunks, pick, top, heat, k, p, q,
                tl.load(seeds + row), tl.load(positions + row), vocab, chunks, pick * 0 + runs,
                CHUNKS, RUNS, ROWS, SUB, MARGIN, FAST,
            )  # fmt: skip
    tl.store(tokens + row, pick.to(tl.int64))
    tl.store(finite + row, good)
