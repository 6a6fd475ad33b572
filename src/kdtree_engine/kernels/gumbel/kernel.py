"""Gumbel noise in registers: the layout of the operator, word for word.

    words(seed, position, blocks)  word 4 b + j of a row is output word j of Philox(counter b)
    exact(words)                   -log(-log((word + 0.5) 2^-32)) in float64, rounded to float32
    approximate(words)             the same within 2^-16, in float32
    bounds_kernel                  float16 numbers no smaller than the noise, for many rows to read

Every kernel that decides a token uses `exact`; the others only tell which tokens need it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from kdtree_engine.kernels.prologue import begin

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _product(a, factor: tl.constexpr):
    """Upper and lower word of a x factor: one wide multiplication."""
    whole = a.to(tl.uint64) * factor
    return (whole >> 32).to(tl.uint32), whole.to(tl.uint32)


@triton.jit
def words_of(seed, position, block):
    """The four words (uint32) of each counter block; seed and position are int64 scalars."""
    c2 = block.to(tl.uint32)
    c3 = c2 * 0
    c0 = (position & 0xFFFFFFFF).to(tl.uint32) + c3
    c1 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + c3
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        high2, low2 = _product(c2, 0xCD9E8D57)
        high0, low0 = _product(c0, 0xD2511F53)
        c0, c1 = high2 ^ c1 ^ k0, low2
        c2, c3 = high0 ^ c3 ^ k1, low0
        k0 = (k0.to(tl.int64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.int64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words(seed, position, blocks):
    """Words [..., 4 B] (uint32) in token order, from counter blocks [..., B]."""
    first, second, third, fourth = words_of(seed, position, blocks)
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit
def word_of(seed, position, token):
    """The word (uint32) of each token, of any shape: a counter block for every one."""
    first, second, third, fourth = words_of(seed, position, token // 4)
    place = token % 4
    low = tl.where(place == 0, first, second)
    high = tl.where(place == 2, third, fourth)
    return tl.where(place < 2, low, high)


@triton.jit
def exact(word):
    """The operator's noise, float32, of uint32 words."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def exact_at(seed, position, token):
    """The operator's noise of one token (int32 scalar)."""
    return exact(word_of(seed, position, token))


@triton.jit
def log2(x, FAST: tl.constexpr):
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
    return -LN2 * _log2_exponential(word, FAST)


@triton.jit
def perturbed(value, word, FAST: tl.constexpr):
    """value + the approximate noise. Explicit fma: the same bits in every kernel."""
    return tl.fma(_log2_exponential(word, FAST), tl.full(value.shape, -LN2, tl.float32), value)


@triton.jit
def _log2_exponential(word, FAST: tl.constexpr):
    """log2 of E."""
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    tail = 0.3333333333333333 + rest * (0.25 + rest * 0.2)
    near = rest + rest * rest * (0.5 + rest * tail)
    far = -LN2 * log2(uniform, FAST)
    return log2(tl.where(rest < 0.0625, near, far), FAST)


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


@triton.jit
def store_bounds(seed, position, first, out, vocab, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """Bounds of the noise of 4 BLOCK tokens, from counter block `first` on, to the row at `out`.

    float16 rounds by 2^-11 of the number, or by 2^-25; the widening by 2^-10 of it and 2^-15 is
    more than that and the approximation's 2^-16.
    """
    token = first * 4 + tl.arange(0, BLOCK * 4)
    value = approximate(words(seed, position, first + tl.arange(0, BLOCK)), FAST)
    value += tl.abs(value) * 0.0009765625 + 0.000030517578125
    tl.store(out + token, value.to(out.dtype.element_ty), mask=token < vocab)


@triton.jit
def bounds_kernel(
    seeds,  # [B] int64
    contexts,  # [B] int32 or int64
    temperature,  # [B] float32; where it is 0 nothing is written
    bounds,  # [B, depths, vocab] float16
    vocab,
    BLOCK: tl.constexpr,  # counter blocks a program: 4 BLOCK tokens
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, depths, B). Bounds of the noise at position contexts + 1 + depth."""
    begin(PDL)
    request, depth = tl.program_id(2), tl.program_id(1)
    if tl.load(temperature + request) > 0:
        position = tl.load(contexts + request).to(tl.int64) + 1 + depth
        out = bounds + (request * tl.num_programs(1) + depth).to(tl.int64) * vocab
        first = tl.program_id(0) * BLOCK
        store_bounds(tl.load(seeds + request), position, first, out, vocab, BLOCK, FAST)
