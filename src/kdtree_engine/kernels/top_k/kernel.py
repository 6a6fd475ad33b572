"""The K likeliest of each row: an exact choice in two launches.

    candidates_kernel  a chunk of a row a program: its K largest in token order, its largest value,
                       and the sum of exp(value - largest)
    merge_kernel       a row a program: the K largest of the chunks' K, sorted; log-sum-exp

A value is compared as the int32 that has its order (NaN highest, both zeros alike). The K-th
largest key is found bit by bit, a count a bit, until a count is exactly K; of keys equal to it the
first ones count, so equal values go to the smaller token. A prefix sum gives each chosen element
its place, in token order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.gumbel.kernel import approximate
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
def _choose(key, K):
    """Place of each of the K largest keys [n], by index; -1 elsewhere. n < 2^15, K <= n."""
    found = 0  # the K-th largest, top bit flipped so that bits are set from above
    bit = 31
    while bit >= 0:
        trial = found | (1 << bit)
        count = tl.sum((key >= (trial ^ LOWEST)).to(tl.int32), 0)
        found = tl.where(count >= K, trial, found)
        bit = tl.where(count == K, -1, bit - 1)  # the bits below no longer matter
    limit = found ^ LOWEST
    above, level = key > limit, key == limit
    room = K - tl.sum(above.to(tl.int32), 0)
    seen = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 0)
    place = (seen & 0xFFFF) + tl.minimum(seen >> 16, room) - 1
    return tl.where(above | (level & ((seen >> 16) <= room)), place, -1)


@triton.jit
def candidates_kernel(
    logits,  # [R, vocab], rows `stride` apart
    temperature,  # [R] float32, or None; with it the next two
    seeds,  # [R] int64
    positions,  # [R] int64
    keys,  # [R, chunks, K] int32, from here on outputs
    ids,  # [R, chunks, K] int32
    largest,  # [R, chunks] float32
    sums,  # [R, chunks] float32
    vocab,
    stride,
    K,
    CHUNK: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, R)."""
    begin(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    value = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    value = value.to(tl.float32)
    if temperature is not None:
        heat = tl.load(temperature + row)
        if heat > 0:
            blocks = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
            word = random_words(tl.load(seeds + row), tl.load(positions + row), blocks)
            value = value / heat + approximate(word, FAST)
    key = tl.where(inside, _key(value), LOWEST)
    place = _choose(key, K)
    out = row * tl.num_programs(0) + chunk
    tl.store(keys + out * K + place, key, mask=place >= 0)
    tl.store(ids + out * K + place, token, mask=place >= 0)
    top = tl.max(value, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(largest + out, top)
    tl.store(sums + out, tl.sum(tl.exp(value - safe), 0))


@triton.jit
def merge_kernel(
    keys,  # [R, chunks, K] int32; a row's first K places are overwritten
    ids,  # [R, chunks, K] int32; likewise
    largest,  # [R, chunks] float32
    sums,  # [R, chunks] float32
    log_probs,  # [R, K] float32, outputs
    tokens,  # [R, K] int64
    chunks,
    K,
    COUNT: tl.constexpr,  # powers of two from chunks x K, chunks and K
    CHUNKS: tl.constexpr,
    KP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, CHUNKS)
    tops = tl.load(largest + row * chunks + part, mask=part < chunks, other=float("-inf"))
    parts = tl.load(sums + row * chunks + part, mask=part < chunks, other=0.0)
    top = tl.max(tops, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    scaled = tl.where(tops == float("-inf"), 0.0, tl.exp(tops - safe))
    total = safe + tl.log(tl.sum(parts * scaled, 0))

    keys += row * chunks * K
    ids += row * chunks * K
    index = tl.arange(0, COUNT)
    key = tl.load(keys + index, mask=index < chunks * K, other=LOWEST)
    name = tl.load(ids + index, mask=index < chunks * K, other=0)
    place = _choose(key, K)
    tl.debug_barrier()  # all are read
    tl.store(keys + place, key, mask=place >= 0)
    tl.store(ids + place, name, mask=place >= 0)
    tl.debug_barrier()  # all are written
    mine = tl.arange(0, KP)
    one = tl.load(keys + mine, mask=mine < K, other=LOWEST)
    name = tl.load(ids + mine, mask=mine < K, other=0)
    other = tl.arange(0, KP)[None, :]
    rival = tl.load(keys + other, mask=other < K, other=LOWEST)
    earlier = (rival == one[:, None]) & (other < mine[:, None])
    ahead = ((rival > one[:, None]) | earlier) & (other < K)
    rank = tl.sum(ahead.to(tl.int32), 1)
    tl.store(log_probs + row * K + rank, _value(one) - total, mask=mine < K)
    tl.store(tokens + row * K + rank, name.to(tl.int64), mask=mine < K)
