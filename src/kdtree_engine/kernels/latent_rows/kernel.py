"""From down = [query | latent | k_pe]: the normed query, and the cache row [normed latent |
rotated k_pe] at the row's slot. One row a program; layouts are constants of the widths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin
from kdtree_engine.kernels.rms_norm.kernel import norm_scale


@triton.jit
def added(parts, inside, R, WIDTH, SEGMENTS: tl.constexpr):
    """parts[0] + parts[1] + ... at pointers `parts` of the first part, float32."""
    total = tl.load(parts, mask=inside, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SEGMENTS):
        total += tl.load(parts + s * R * WIDTH, mask=inside, other=0.0)
    return total


@triton.jit
def rotated(parts, d, inside, cos, sin, R, WIDTH, SEGMENTS: tl.constexpr):
    """Pairs (2i, 2i+1) at parts + d turned by the angles: x cos + partner sin, sin signed."""
    x = added(parts + d, inside, R, WIDTH, SEGMENTS)
    partner = added(parts + (d ^ 1), inside, R, WIDTH, SEGMENTS)
    return tl.fma(x, cos, partner * sin)


@triton.jit
def latent_rows(
    parts, query_weight, latent_weight, cos, sin, slots, latents, query_out, R, WIDTH, eps, Q,
    C: tl.constexpr, P: tl.constexpr, SEGMENTS: tl.constexpr, NORM_QUERY: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts [SEGMENTS, R, WIDTH]; Q, C, P: widths of query, latent and k_pe; cos, sin [R, P].

    latents [slots, C + P]; query_out [R, Q] where NORM_QUERY. grid (R,).
    """
    begin(PDL)
    r = tl.program_id(0).to(tl.int64)
    row = parts + r * WIDTH
    dtype = latents.dtype.element_ty
    if NORM_QUERY:
        q = tl.arange(0, BLOCK_Q)
        query = added(row + q, q < Q, R, WIDTH, SEGMENTS)
        normed = (query * norm_scale(query, Q, eps)).to(dtype)
        weight = tl.load(query_weight + q, mask=q < Q, other=0.0)
        tl.store(query_out + r * Q + q, (normed * weight).to(dtype), mask=q < Q)
    slot = latents + tl.load(slots + r) * (C + P)
    c = tl.arange(0, BLOCK_C)
    latent = added(row + Q + c, c < C, R, WIDTH, SEGMENTS)
    normed = (latent * norm_scale(latent, C, eps)).to(dtype)
    weight = tl.load(latent_weight + c, mask=c < C, other=0.0)
    tl.store(slot + c, (normed * weight).to(dtype), mask=c < C)
    p = tl.arange(0, BLOCK_P)
    turn = tl.load(cos + r * P + p, mask=p < P, other=0.0)
    lean = tl.load(sin + r * P + p, mask=p < P, other=0.0)
    key = rotated(row + Q + C, p, p < P, turn, lean, R, WIDTH, SEGMENTS)
    tl.store(slot + C + p, key.to(dtype), mask=p < P)
