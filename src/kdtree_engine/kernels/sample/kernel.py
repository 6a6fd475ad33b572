"""One token a row: greedy, or the best perturbed token that the row's filters keep.

    runs_kernel    a chunk of runs of SUB tokens a program: a run's largest logit, the first place
                   of it and, in sampled rows, a bound of its scores and a rough sum of exp(x)
    choose_kernel  a row a program: the runs that may hold the pick are looked into; the filters

x = (logit - max) / T, score = x + noise, both float32; mass = floor(exp(x) 2^44), int64

What decides is a comparison of float32 scores or an integer sum, exact in any order. The rest only
tells what need not be looked at:

Bound. A run's bound is no smaller than its scores (but for rounding); a run whose bound is under
the best score cannot hold the pick. The noise's bounds are read where the caller has them
(NoiseBounds of kernels/gumbel: rows of one position share them), and then the largest bound is
nearly the best score. Else noise = -log(-log u) <= -log(1 - u), one logarithm instead of two and
no care near u = 1; in the mean one token of a row, beside the pick, has such a bound above the
pick's score: the chance of a token is at most exp(x - score), and the sum of these has the mean 1.
Approximate score. The float64 noise is computed only for tokens whose approximate score is within
MARGIN = 2^-14 of the best one seen, and not at all for a token that has none so near. The
approximation is off by under half of that where it matters, at |x| < 27: by 2^-16 of noise, 2^-18
of rounding. The bound is off by less: 32 x 2^-22 for the logarithm, 3 x 2^-24 x 27 < 2^-17.6 for x
by a product, 2^-19 for multiplying bounds that were read. FLOOR: the likeliest token has x = 0
and noise of -3.14 at least and is kept by every filter, so nothing below wins.
Rough sums. Off by less than ROUGH = 2^-15 of themselves: exp(x) by |x| 2^-22 on both sides, of
which tokens beyond |x| = 15 have no share that counts (there are under 2^19), 2^-20 for adding 256
of them, 2^-17 for adding the sums of 128 tiles. Where top-p hangs on less, masses are added up.

Filters keep all tokens above a level of x. A pick that they reject is replaced by the best among
the strictly likelier tokens. These lie in the runs whose largest logit is strictly likelier. To
count them, such runs are listed and gathered, WIDE runs at a time (ROWS, to add up masses): a few
tiles instead of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.gumbel.kernel import LN2, approximate, exact_at, log2
from kdtree_engine.kernels.gumbel.kernel import words as random_words
from kdtree_engine.kernels.prologue import begin

NOWHERE = tl.constexpr(2147483647)
INFINITY_BITS = tl.constexpr(0x7F800000)
FLOOR = tl.constexpr(-3.2)
NEVER = tl.constexpr(float("-inf"))
ROUGH = tl.constexpr(2.0**-15)
MASS_ONE = tl.constexpr(2.0**44)
LOG2_E = tl.constexpr(1.4426950408889634)
COLDEST = tl.constexpr(1e-30)  # temperatures whose inverse is used
LIKELY = tl.constexpr(-5.0)  # runs with a larger x are counted at first


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
    return (tl.exp(x.to(tl.float64)) * MASS_ONE).to(tl.int64)


@triton.jit
def _depth(x):
    """|x| as int32 bits: x <= 0, so rising bits are falling x."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def _score(logits, top, heat, seed, position, token):
    """The exact score of one token."""
    x = tl.div_rn(tl.load(logits + token) - top, heat)
    return x + exact_at(seed, position, token)


@triton.jit
def _best(
    score, token, logits, top, heat, seed, position, best, pick, known, MARGIN: tl.constexpr
):  # fmt: skip
    """(best, pick, known) against the tokens [a, b] of approximate scores; equal: the smaller.

    best is pick's exact score if `known`, else its approximate one, then none other is near.
    """
    highest = tl.max(tl.max(score, 1), 0)
    limit = tl.maximum(tl.maximum(highest, best) - MARGIN, FLOOR)
    near = score >= limit
    number = _sum(near.to(tl.int32))
    here = _first(near, token)
    if (number == 1) & (best < limit):
        best, pick, known = highest, here, known * 0
    elif number > 0:
        if (known == 0) & (pick < NOWHERE):
            best = _score(logits, top, heat, seed, position, pick)
        known = known * 0 + 1
        while here < NOWHERE:
            value = _score(logits, top, heat, seed, position, here)
            better = (value > best) | ((value == best) & (here < pick))
            best = tl.where(better, value, best)
            pick = tl.where(better, here, pick)
            here = _first(near & (token > here), token)
    return best, pick, known


@triton.jit
def _values(logits, token, vocab, WHOLE: tl.constexpr):
    """Logits of the tokens, -inf beyond the vocabulary, +inf for NaN."""
    if WHOLE:
        value = tl.load(logits + token)
    else:
        value = tl.load(logits + token, mask=token < vocab, other=NEVER)
    return tl.where(value == value, value, float("inf"))


@triton.jit
def _rest(seed, position, blocks, FAST: tl.constexpr):
    """log2 of (1 - u) 2^32 of the tokens of counter blocks."""
    word = random_words(seed, position, blocks)
    return log2((word ^ 0xFFFFFFFF).to(tl.float32), FAST)


@triton.jit
def _drawn_bound(left, right, seed, position, run, SUB: tl.constexpr, FAST: tl.constexpr):
    """Bounds of runs [RUNS] from their halves' x log2(e) [RUNS, SUB / 2] and -log(1 - u)."""
    blocks = run[:, None] * (SUB // 4) + tl.arange(0, SUB // 8)[None, :]
    bound = left - _rest(seed, position, blocks, FAST)
    bound = tl.maximum(bound, right - _rest(seed, position, blocks + SUB // 8, FAST))
    return (tl.max(bound, 1) + 32.0) * LN2


@triton.jit
def _read_bound(left, right, near, far):
    """The same from the halves' bounds of the noise."""
    unit = tl.full(left.shape, LOG2_E, tl.float32)
    bound = tl.fma(near.to(tl.float32), unit, left)
    return tl.max(tl.maximum(bound, tl.fma(far.to(tl.float32), unit, right)), 1) * LN2


@triton.jit
def runs_kernel(
    logits,  # [R, vocab] float32, rows `stride` apart
    temperature,  # [R] float32
    top_p,  # [R] float32
    seeds,  # [R] int64
    positions,  # [R] int64
    noise,  # [R / each, depths, vocab] float16: bounds at contexts + 1 + depth; or None
    contexts,  # [R / each] int32 or int64; or None
    run_max,  # [R, runs] float32, from here on outputs; NaN counts as +inf
    run_first,  # [R, runs] int32
    run_bound,  # [R, runs] float32, of sampled rows: of x + noise, x 0 at the run's top
    run_sum,  # [R, runs] float32, where also top_p < 1: of exp(x), likewise
    vocab,
    stride,
    depths,
    each,
    RUNS: tl.constexpr,  # runs a program
    SUB: tl.constexpr,  # tokens a run, 256: half of one is a load of a warp
    WHOLE: tl.constexpr,  # whether every chunk is full
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, R)."""
    begin(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    run = chunk * RUNS + tl.arange(0, RUNS)
    token = run[:, None] * SUB + tl.arange(0, SUB // 2)[None, :]
    heat, position = tl.load(temperature + row), tl.load(positions + row)
    seed, share = tl.load(seeds + row), tl.load(top_p + row)
    if noise is not None:
        request = tl.program_id(1) // each
        place = position - tl.load(contexts + request) - 1
    left = _values(logits + row * stride, token, vocab, WHOLE)
    right = _values(logits + row * stride, token + SUB // 2, vocab, WHOLE)
    if noise is not None:  # read here, so that one wait covers all
        known = (heat > 0) & (place >= 0) & (place < depths)
        here = noise + (request.to(tl.int64) * depths + place) * vocab + token
        end = tl.where(known, vocab, 0)
        near = tl.load(here, mask=token < end, other=0.0)
        far = tl.load(here + SUB // 2, mask=token + SUB // 2 < end, other=0.0)
    tops = tl.max(tl.maximum(left, right), 1)
    out = row * tl.num_programs(0) * RUNS + run
    tl.store(run_max + out, tops)
    first = tl.where(right == tops[:, None], token + SUB // 2, NOWHERE)
    first = tl.where(left == tops[:, None], token, first)
    tl.store(run_first + out, tl.min(first, 1))
    if heat > 0:
        base = tl.where(tops == NEVER, 0.0, tops)[:, None]
        # a smaller x than the true one would be no bound: a colder row's is larger
        scale = tl.div_rn(LOG2_E, tl.maximum(heat, COLDEST))
        left, right = (left - base) * scale, (right - base) * scale
        if noise is None:
            bound = _drawn_bound(left, right, seed, position, run, SUB, FAST)
        elif known:
            bound = _read_bound(left, right, near, far)
        else:
            bound = _drawn_bound(left, right, seed, position, run, SUB, FAST)
        tl.store(run_bound + out, bound)
        if share < 1.0:
            tl.store(run_sum + out, tl.sum(tl.exp2(left) + tl.exp2(right), 1))


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
def _whole_mass(logits, top, heat, vocab, runs, ROWS: tl.constexpr, SUB: tl.constexpr):
    """Mass of the row."""
    mass = runs.to(tl.int64) * 0
    first = runs * 0
    while first < runs:
        token = (first + tl.arange(0, ROWS))[:, None] * SUB + tl.arange(0, SUB)[None, :]
        value = tl.load(logits + token, mask=token < vocab, other=NEVER)
        mass += _sum(_mass(tl.div_rn(value - top, heat)))
        first += ROWS
    return mass


@triton.jit
def _count(
    logits, listing, wanted, level, top, heat, vocab, most, enough, number, share,
    RUNS: tl.constexpr, WIDE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """number and the rough sum of exp(x), plus those of the tokens with x > level in the wanted
    runs [RUNS].

    Stops where number has reached `most` or the sum `enough`.
    """
    count = _list(listing, wanted, RUNS)
    first = count * 0
    while (first < count) & (number < most) & (share < enough):
        _, _, x = _tile(logits, listing, first, count, top, heat, vocab, WIDE, SUB)
        above = x > level
        number += _sum(above.to(tl.int32))
        share += _sum(tl.where(above, tl.exp(x), 0.0))
        first += WIDE
    return number, share


@triton.jit
def _mass_above(
    logits, listing, wanted, level, top, heat, vocab,
    RUNS: tl.constexpr, ROWS: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Mass of the tokens with x > level in the wanted runs [RUNS]."""
    count = _list(listing, wanted, RUNS)
    mass = count.to(tl.int64) * 0
    first = count * 0
    while first < count:
        _, _, x = _tile(logits, listing, first, count, top, heat, vocab, ROWS, SUB)
        mass += _sum(tl.where(x > level, _mass(x), 0))
        first += ROWS
    return mass


@triton.jit
def _reach(depth, k, most):
    """Bits within which at least k of depth [n] lie, 0 < k <= n < 2^21: `most` of them at most, or
    else the smallest such bits. A step counts at three quarters of the range at once.
    """
    below, reach = k * 0 - 1, k * 0 + INFINITY_BITS
    within = tl.sum((depth <= reach).to(tl.int32), 0)
    while (reach - below > 1) & (within > most):
        half = (reach - below) // 2
        quarter = half // 2
        one, two, three = below + quarter, below + half, below + half + quarter
        packed = (depth <= one).to(tl.int64) | ((depth <= two).to(tl.int64) << 21)
        counts = tl.sum(packed | ((depth <= three).to(tl.int64) << 42), 0)
        first = (counts & 0x1FFFFF).to(tl.int32)
        second = ((counts >> 21) & 0x1FFFFF).to(tl.int32)
        third = (counts >> 42).to(tl.int32)
        within = tl.where(third >= k, third, within)
        reach = tl.where(third >= k, three, reach)
        within = tl.where(second >= k, second, within)
        reach = tl.where(second >= k, two, reach)
        within = tl.where(first >= k, first, within)
        reach = tl.where(first >= k, one, reach)
        below = tl.where(first < k, one, below)
        below = tl.where(second < k, two, below)
        below = tl.where(third < k, three, below)
    return reach


@triton.jit
def _kept_mass(
    logits, listing, shelf, run_x, runs, top, heat, vocab, k,
    RUNS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, SUB: tl.constexpr,
    SHELF: tl.constexpr,
):  # fmt: skip
    """Mass of the tokens that top-k leaves: all down to the k-th largest x, 0 < k < vocab.

    The k-th largest x is no less than the k-th largest run's. Tokens down to that one go to the
    shelf [SHELF]; where it is too small, the level is found by passes over the runs.
    """
    depth = tl.where(tl.arange(0, RUNS) < runs, _depth(run_x), NOWHERE)
    bound = runs * 0 + INFINITY_BITS
    if k <= runs:
        bound = _reach(depth, k, k + k // 2)
    count = _list(listing, depth <= bound, RUNS)
    held = count * 0
    first = count * 0
    while (first < count) & (held <= SHELF):
        _, _, x = _tile(logits, listing, first, count, top, heat, vocab, WIDE, SUB)
        deep = tl.reshape(_depth(x), [WIDE * SUB])
        taken = deep <= bound
        place = held + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(shelf + place, deep, mask=taken & (place < SHELF))
        held += tl.sum(taken.to(tl.int32), 0)
        first += WIDE
    mass = count.to(tl.int64) * 0
    if held <= SHELF:
        tl.debug_barrier()  # all are written
        place = tl.arange(0, SHELF)
        deep = tl.load(shelf + place, mask=place < held, other=NOWHERE)
        level = _reach(deep, k, k)
        x = tl.where(deep <= level, -deep.to(tl.float32, bitcast=True), NEVER)
        mass = tl.sum(_mass(x), 0)
    else:
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
        first = count * 0
        while first < count:
            _, _, x = _tile(logits, listing, first, count, top, heat, vocab, ROWS, SUB)
            mass += _sum(tl.where(_depth(x) <= level, _mass(x), 0))
            first += ROWS
    return mass


@triton.jit
def _draw(
    logits, bound, level, top, heat, vocab, seed, position,
    RUNS: tl.constexpr, SUB: tl.constexpr, MARGIN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The best perturbed token with x > level; bound [RUNS]: of each run's scores, -inf = none.

    Runs are looked into by falling bound, until none can hold a better token: mostly the first.
    """
    best, pick = tl.full((), NEVER, tl.float32), tl.full((), NOWHERE, tl.int32)
    known = tl.full((), 0, tl.int32)
    part = tl.arange(0, RUNS)
    highest = tl.max(bound, 0)
    limit = highest
    while highest >= limit:
        run = tl.min(tl.where(bound == highest, part, RUNS), 0)
        token = run * SUB + tl.arange(0, SUB)[None, :]
        x = tl.div_rn(tl.load(logits + token, mask=token < vocab, other=NEVER) - top, heat)
        blocks = run * (SUB // 4) + tl.arange(0, SUB // 4)[None, :]
        score = x + approximate(random_words(seed, position, blocks), FAST)
        score = tl.where(x > level, score, NEVER)
        best, pick, known = _best(
            score, token, logits, top, heat, seed, position, best, pick, known, MARGIN
        )
        bound = tl.where(part == run, NEVER, bound)
        highest = tl.max(bound, 0)
        limit = tl.maximum(best - MARGIN, FLOOR)
    return pick


@triton.jit
def _limit(total, p):
    """What the mass of likelier tokens must be under, float64, by the total mass (float64)."""
    return tl.maximum(p.to(tl.float64) * total, 1.0)


@triton.jit
def _descend(
    logits, run_sum, listing, shelf, pick, run_x, bound, top, heat, k, p, q, seed, position,
    vocab, runs,
    RUNS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, SUB: tl.constexpr,
    SHELF: tl.constexpr, MARGIN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """From the best token without filters to the best one that they keep."""
    by_count, by_mass = (k > 0) & (k < vocab), p < 1.0
    part = tl.arange(0, RUNS)
    most = tl.where(by_count, k, NOWHERE).to(tl.int32)
    rough = ((by_count | (heat < COLDEST)) == 0).to(tl.int32)  # whether limit is
    limit = tl.full((), float("inf"), tl.float64)
    if by_mass:
        if by_count:
            total = _kept_mass(
                logits, listing, shelf, run_x, runs, top, heat, vocab, most,
                RUNS, ROWS, WIDE, SUB, SHELF,
            ).to(tl.float64)  # fmt: skip
        elif heat < COLDEST:
            total = _whole_mass(logits, top, heat, vocab, runs, ROWS, SUB).to(tl.float64)
        else:
            sums = tl.load(run_sum + part, mask=part < runs, other=0.0)
            total = tl.sum(sums * tl.exp(run_x), 0).to(tl.float64) * MASS_ONE
        limit = _limit(total, p)
    searching = runs * 0 + 1
    while searching != 0:
        level = tl.div_rn(tl.load(logits + pick) - top, heat)
        sure = limit * (1.0 + 3.0 * ROUGH)
        enough = (sure / MASS_ONE).to(tl.float32)
        number, share = runs * 0, tl.full((), 0.0, tl.float32)
        bar = tl.maximum(level, LIKELY)
        number, share = _count(
            logits, listing, run_x > bar, level, top, heat, vocab, most, enough, number, share,
            RUNS, WIDE, SUB,
        )  # fmt: skip
        if level < LIKELY:
            number, share = _count(
                logits, listing, (run_x > level) & (run_x <= bar), level, top, heat, vocab, most,
                enough, number, share, RUNS, WIDE, SUB,
            )  # fmt: skip
        mass = share.to(tl.float64) * MASS_ONE
        fails = (number >= most) | (mass >= sure)
        if by_mass & (fails == 0) & (mass > limit * (1.0 - 3.0 * ROUGH)):
            if rough != 0:
                total = _whole_mass(logits, top, heat, vocab, runs, ROWS, SUB)
                limit = _limit(total.to(tl.float64), p)
            rough = rough * 0
            exact = _mass_above(
                logits, listing, run_x > level, level, top, heat, vocab, RUNS, ROWS, SUB
            )
            fails = exact.to(tl.float64) >= limit
        if q > 0.0:
            fails = fails | (tl.exp(level.to(tl.float64)) < q.to(tl.float64))
        searching = (fails & (number > 0)).to(tl.int32)
        if searching != 0:
            pick = _draw(
                logits, tl.where(run_x > level, bound, NEVER), level, top, heat, vocab,
                seed, position, RUNS, SUB, MARGIN, FAST,
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
    run_max,  # [R, runs] float32
    run_first,  # [R, runs] int32
    run_bound,  # [R, runs] float32
    run_sum,  # [R, runs] float32
    listing,  # [R, runs] int32, scratch
    shelf,  # [R, SHELF] int32, scratch
    tokens,  # [R] int64, outputs
    finite,  # [R] bool
    vocab,
    stride,
    runs,
    RUNS: tl.constexpr,  # a power of two from runs on
    ROWS: tl.constexpr,  # runs a tile
    WIDE: tl.constexpr,  # runs a tile that is only counted
    SUB: tl.constexpr,
    SHELF: tl.constexpr,
    MARGIN: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, RUNS)
    inside = part < runs
    here = row * runs + part
    tops = tl.load(run_max + here, mask=inside, other=NEVER)
    places = tl.load(run_first + here, mask=inside, other=NOWHERE)
    heat = tl.load(temperature + row)
    bound = tl.load(run_bound + here, mask=inside, other=NEVER)
    k, p, q = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    top = tl.max(tops, 0)
    pick = tl.min(tl.where(tops == top, places, NOWHERE), 0)
    good = (top > NEVER) & (top < float("inf"))
    if good & (heat > 0):
        logits += row * stride
        listing += row * runs
        run_x = tl.div_rn(tops - top, heat)
        bound += run_x
        lowest = tl.full((), NEVER, tl.float32)
        pick = _draw(
            logits, bound, lowest, top, heat, vocab, seed, position, RUNS, SUB, MARGIN, FAST
        )
        if ((k > 0) & (k < vocab)) | (p < 1.0) | (q > 0.0):
            pick = _descend(
                logits, run_sum + row * runs, listing, shelf + row * SHELF, pick, run_x, bound,
                top, heat, k, p, q, seed, position, vocab, pick * 0 + runs,
                RUNS, ROWS, WIDE, SUB, SHELF, MARGIN, FAST,
            )  # fmt: skip
    tl.store(tokens + row, pick.to(tl.int64))
    tl.store(finite + row, good)
