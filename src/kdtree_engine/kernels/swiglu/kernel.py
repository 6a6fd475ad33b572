"""silu(gate) * up of a fused product's parts: elementwise, in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin


@triton.jit
def silu_times(gate, up):
    """gate / (1 + exp(-gate)) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu_parts(parts, out, R, INNER, WIDTH, SEGMENTS, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """parts [SEGMENTS, R, WIDTH] float32, gate columns then up columns; out [R, INNER].

    grid (R, cdiv(INNER, BLOCK)).
    """
    begin(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < INNER
    gate = tl.load(parts + r * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(parts + r * WIDTH + INNER + i, mask=inside, other=0.0).to(tl.float32)
    for s in range(1, SEGMENTS):
        row = parts + (s * R + r) * WIDTH
        gate += tl.load(row + i, mask=inside, other=0.0)
        up += tl.load(row + INNER + i, mask=inside, other=0.0)
    tl.store(out + r * INNER + i, silu_times(gate, up).to(out.dtype.element_ty), mask=inside)
