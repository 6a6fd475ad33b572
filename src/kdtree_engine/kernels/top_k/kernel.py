"""The K likeliest of each row: an exact choice in two launches.

    top_runs_kernel  a chunk of a row a program: the largest value of each run of SUB tokens, of
                     each group of runs and of the chunk, and the sum of exp(value - largest)
    merge_kernel     a row a program: the K largest tokens, sorted; log-sum-exp; and, where asked
                     for, the log-probability of one more token

A value is compared as the int32 that has its order (NaN highest, both zeros alike). The K largest
tokens lie in the K groups with the largest values, and there in the K runs; so a few groups are
picked, then a few of their runs, then a few of their tokens, and those are ranked. One program does
this for a row, so the fewer keys a choice is made among, the better. Picking needs no sort: a level
that between K and MOST of the keys reach is found by halving its range, a count a step. Where so
many keys are equal that there is no such level, those above it and the first of the equal ones are
picked, in token order, so equal values go to the smaller token. A prefix sum gives each picked
element its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.gumbel.kernel import perturbed, word_of
from kdtree_engine.kernels.gumbel.kernel import words as random_words
from kdtree_engine.kernels.prologue import begin

LOWEST = tl.constexpr(-2147483648)  # key of a place beyond the vocabulary
HIGHEST = tl.constexpr(2147483647)  # key of NaN; its bits are a NaN's


@triton.jit
def _key(value):
    """int32 in the order of float32 values."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & HIGHEST), HIGHEST)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & HIGHEST)).to(tl.float32, bitcast=True)


@triton.jit
def _level(key, K, MOST: tl.constexpr, guess, highest):
    """A level that K..MOST of the keys [n] reach, else the K-th largest key; and how many reach it.

    K <= n; no key is over `highest`, and none LOWEST, save those that do not count. `guess` first.
    """
    low = tl.full((), LOWEST, tl.int32)  # reached by K or more
    high = highest.to(tl.int64) + 1  # reached by fewer than K
    reached = tl.full((), HIGHEST, tl.int32)
    trial = guess
    while (reached > MOST) & (high - low > 1):
        count = tl.sum((key >= trial).to(tl.int32), 0)
        enough = count >= K
        reached = tl.where(enough, count, reached)
        low = tl.where(enough, trial, low)
        high = tl.where(enough, high, trial.to(tl.int64))
        trial = (low + (high - low) // 2).to(tl.int32)
    return low, reached


@triton.jit
def _places(key, level, reached, MOST: tl.constexpr):
    """Place of each of the `reached` keys [n], n < 2^15, that reach the level; -1 elsewhere.

    Where they are more than MOST, of those that equal the level only the first have one.
    """
    if reached <= MOST:
        here = key >= level
        place = tl.where(here, tl.cumsum(here.to(tl.int32), 0) - 1, -1)
    else:
        above, equal = key > level, key == level
        room = MOST - tl.sum(above.to(tl.int32), 0)
        seen = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
        place = (seen & 0xFFFF) + tl.minimum(seen >> 16, room) - 1
        place = tl.where(above | (equal & ((seen >> 16) <= room)), place, -1)
    return place


@triton.jit
def _draw_of(temperature, seeds, positions, row, HOT: tl.constexpr):
    """Temperature, seed and position of a row; 0 where none are given."""
    heat = tl.full((), 0.0, tl.float32)
    seed, position = row * 0, row * 0
    if HOT:
        heat = tl.load(temperature + row)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
    return heat, seed, position


@triton.jit
def _keys(
    logits, row, token, blocks, vocab, stride, heat, seed, position, names,
    NAMED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Values and keys of a row's tokens [a, b]; counter blocks [a, b / 4]. Both kernels' values
    have the same bits: no multiplication here feeds an addition of another operation.
    """
    inside = (token >= 0) & (token < vocab)
    value = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    value = value.to(tl.float32)
    if heat > 0:
        if NAMED:
            word = word_of(seed, position, tl.load(names + token, mask=inside, other=0))
        else:
            word = random_words(seed, position, blocks)
        value = perturbed(value / heat, word, FAST)
    return value, tl.where(inside, _key(value), LOWEST)


@triton.jit
def top_runs_kernel(
    logits,  # [R, vocab], rows `stride` apart
    temperature,  # [R] float32, where HOT, like the next two
    seeds,  # [R] int64
    positions,  # [R] int64
    names,  # [vocab] int64, where NAMED: the token of each column
    keys,  # [R, chunks x RUNS] int32, from here on outputs: the runs' largest
    groups,  # [R, chunks x RUNS / GROUP] int32, the groups'
    largest,  # [R, chunks] float32, NaN where there is one
    sums,  # [R, chunks] float32
    vocab,
    stride,
    RUNS: tl.constexpr,
    GROUP: tl.constexpr,
    SUB: tl.constexpr,
    HOT: tl.constexpr,
    NAMED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, R)."""
    begin(PDL)
    row, chunk, chunks = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    run = chunk * RUNS + tl.arange(0, RUNS)
    token = run[:, None] * SUB + tl.arange(0, SUB)[None, :]
    blocks = run[:, None] * (SUB // 4) + tl.arange(0, SUB // 4)[None, :]
    heat, seed, position = _draw_of(temperature, seeds, positions, row, HOT)
    value, key = _keys(
        logits, row, token, blocks, vocab, stride, heat, seed, position, names, NAMED, FAST
    )
    key = tl.max(key, 1)
    tl.store(keys + row * chunks * RUNS + run, key)
    key = tl.max(tl.reshape(key, [RUNS // GROUP, GROUP]), 1)
    group = chunk * (RUNS // GROUP) + tl.arange(0, RUNS // GROUP)
    tl.store(groups + row * chunks * (RUNS // GROUP) + group, key)
    top = _value(tl.max(key, 0))
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(largest + row * chunks + chunk, top)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.sum(tl.exp(value - safe), 1), 0))


@triton.jit
def merge_kernel(
    logits,  # [R, vocab], as above
    temperature,
    seeds,
    positions,
    names,
    keys,  # [R, runs] int32
    groups,  # [R, runs / GROUP] int32
    largest,  # [R, chunks] float32
    sums,  # [R, chunks] float32
    listing,  # [R, MOST] int32, scratch
    found,  # [R, MOST] int32, scratch
    found_tokens,  # [R, MOST] int32, scratch
    log_probs,  # [R, K] float32, outputs
    tokens,  # [R, K] int64
    chosen,  # [R] int64 or None: tokens whose log-probabilities are wanted too
    chosen_log_probs,  # [R] float32 or None, output
    vocab,
    stride,
    runs,
    chunks,
    K,
    MOST: tl.constexpr,  # a power of two from 2 K on
    GROUPS: tl.constexpr,  # powers of two from the numbers of groups and chunks on
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,  # runs a group
    SUB: tl.constexpr,
    HOT: tl.constexpr,
    NAMED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, part = tl.arange(0, GROUPS), tl.arange(0, CHUNKS)
    key = tl.load(groups + row * (runs // GROUP) + group, mask=group < runs // GROUP, other=LOWEST)
    tops = tl.load(largest + row * chunks + part, mask=part < chunks, other=float("-inf"))
    parts = tl.load(sums + row * chunks + part, mask=part < chunks, other=0.0)
    heat, seed, position = _draw_of(temperature, seeds, positions, row, HOT)
    highest = tl.max(_key(tops), 0)
    top = _value(highest)
    safe = tl.where(top == float("-inf"), 0.0, top)
    scaled = tl.where(tops == float("-inf"), 0.0, tl.exp(tops - safe))
    total = safe + tl.log(tl.sum(parts * scaled, 0))
    if chosen is not None:
        pick = tl.load(chosen + row)
        inside = (pick >= 0) & (pick < vocab)
        value = tl.load(logits + row * stride + pick, mask=inside, other=float("nan"))
        # by way of the key, as below: the same bits where the token is among the K
        tl.store(chosen_log_probs + row, _value(_key(value.to(tl.float32))) - total)

    # a group or run beyond the vocabulary has LOWEST and is not taken
    listing, found = listing + row * MOST, found + row * MOST
    found_tokens += row * MOST
    # as many groups as chunks reach the least of the chunks' largest values: a good first guess
    least = tl.min(tl.where(part < chunks, _key(tops), HIGHEST), 0)
    level, reached = _level(key, tl.minimum(K, tl.cdiv(vocab, SUB * GROUP)), MOST, least, highest)
    place = _places(key, level, reached, MOST)
    tl.store(found + place, group, mask=place >= 0)
    tl.debug_barrier()  # all are written
    mine = tl.arange(0, MOST)
    group = tl.load(found + mine, mask=mine < reached, other=-1)

    run = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    key = tl.load(keys + row * runs + run, mask=run >= 0, other=LOWEST)
    key, run = tl.reshape(key, [MOST * GROUP]), tl.reshape(run, [MOST * GROUP])
    level, reached = _level(key, tl.minimum(K, tl.cdiv(vocab, SUB)), MOST, level, highest)
    place = _places(key, level, reached, MOST)
    tl.store(listing + place, run, mask=place >= 0)
    tl.debug_barrier()  # all are written
    run = tl.load(listing + mine, mask=mine < reached, other=-1)

    token = run[:, None] * SUB + tl.arange(0, SUB)[None, :]
    blocks = run[:, None] * (SUB // 4) + tl.arange(0, SUB // 4)[None, :]
    _, key = _keys(
        logits, row, token, blocks, vocab, stride, heat, seed, position, names, NAMED, FAST
    )
    key = tl.reshape(key, [MOST * SUB])
    level, reached = _level(key, K, MOST, level, highest)
    place = _places(key, level, reached, MOST)
    tl.store(found + place, key, mask=place >= 0)
    tl.store(found_tokens + place, tl.reshape(token, [MOST * SUB]), mask=place >= 0)
    tl.debug_barrier()  # all are written
    listed = mine < reached
    one = tl.load(found + mine, mask=listed, other=LOWEST)
    other, rival = one[:, None], mine[:, None]
    # places rise with tokens, so of equal keys the smaller token has the smaller place
    ahead = (other > one[None, :]) | ((other == one[None, :]) & (rival < mine[None, :]))
    rank = tl.sum(ahead.to(tl.int32), 0)
    kept = listed & (rank < K)
    tl.store(log_probs + row * K + rank, _value(one) - total, mask=kept)
    column = tl.load(found_tokens + mine, mask=listed, other=0).to(tl.int64)
    if NAMED:
        column = tl.load(names + column, mask=kept, other=0)
    tl.store(tokens + row * K + rank, column, mask=kept)
