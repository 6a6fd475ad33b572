"""Gumbel noise in registers: the layout of the operator, word for word.

    words(seed, position, blocks)  word 4 b + j of a row is output word j of Philox(counter b)
    exact(words)                   -log(-log((word + 0.5) 2^-32)) in float64, rounded to float32
    approximate(words)             the same within 2^-16, in float32

Every kernel that decides a token uses `exact`; `approximate` only tells which tokens need it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from kdtree_engine.kernels.prologue import begin

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def words_of(seed, position, block):
    """The four words (uint32) of each counter block; seed and position are int64 scalars."""
    counter = block.to(tl.uint32)
    stream = counter * 0
    low = (position & 0xFFFFFFFF).to(tl.uint32) + stream
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + stream
    return tl.philox(seed, low, high, counter, stream)


@triton.jit
def words(seed, position, blocks):
    """Words [..., 4 B] (uint32) in token order, from counter blocks [..., B]."""
    first, second, third, fourth = words_of(seed, position, blocks)
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit
def exact(word):
    """The operator's noise, float32, of uint32 words."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def exact_at(seed, position, token):
    """The operator's noise of one token (int32 scalar)."""
    first, second, third, fourth = words_of(seed, position, token // 4)
    place = token % 4
    low = tl.where(place == 0, first, second)
    high = tl.where(place == 2, third, fourth)
    return exact(tl.where(place < 2, low, high))


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """log2 of normal float32 numbers, off by at most 2^-22 of max(1, |log2 x|) (lg2.approx)."""
    if FAST:
        result = libdevice.fast_log2f(x)
    else:
        result = tl.log2(x)
    return result


@triton.jit
def approximate(word, FAST: tl.constexpr):
    """The noise in float32, off by at most 2^-16. FAST is False where inline code does not run.

    E = -log(u). Where u > 15/16, E comes from the complement c = 1 - u (exact up to one rounding)
    as c + c^2/2 + .. + c^5/5, off by c^5/6 < 2^-22 of itself. Elsewhere u is off by 2^-24 and log2
    by 2^-22, and E is at least 0.064, so E is off by 2^-18 of itself, which becomes the noise's
    error; there |log2 E| < 5, so the second logarithm adds 2^-20. Where E is small, the second
    logarithm is off by 33 x 2^-22 x ln 2 < 2^-17.4, rounding by 2^-19.
    """
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    tail = 0.3333333333333333 + rest * (0.25 + rest * 0.2)
    near = rest + rest * rest * (0.5 + rest * tail)
    far = -LN2 * _log2(uniform, FAST)
    return -LN2 * _log2(tl.where(rest < 0.0625, near, far), FAST)


@triton.jit
def gumbel_kernel(
    seeds,  # [R] int64
    positions,  # [R] int64
    noise,  # [R, vocab] float32
    vocab,
    BLOCK: tl.constexpr,  # counter blocks a program: 4 BLOCK tokens
    PDL: tl.constexpr,
):
    """Noise of 4 BLOCK tokens of one row a program."""
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    blocks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    value = exact(words(seed, position, blocks))
    tl.store(noise + row * vocab + token, value, mask=token < vocab)
