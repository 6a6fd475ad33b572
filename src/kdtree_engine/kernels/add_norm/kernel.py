"""x = round(residual + sum of parts); normed = norm of the rounded x. One row a program.

As in rms_norm/kernel.py, the layout is a constant of the row's width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin
from kdtree_engine.kernels.rms_norm.kernel import norm_scale


@triton.jit
def add_norm_rows(
    parts, residual, weight_ptr, x_out, normed_out, R, D, WIDTH, eps,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts [SEGMENTS, R, WIDTH], residual, x_out and normed_out [R, D]. grid (R,)."""
    begin(PDL)
    r = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    y = tl.load(parts + r * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SEGMENTS):
        y += tl.load(parts + (s * R + r) * WIDTH + d, mask=inside, other=0.0)
    dtype = x_out.dtype.element_ty
    past = tl.load(residual + r * D + d, mask=inside, other=0.0).to(tl.float32)
    x = (past + y).to(dtype)
    tl.store(x_out + r * D + d, x, mask=inside)
    wide = x.to(tl.float32)
    normed = (wide * norm_scale(wide, D, eps)).to(dtype)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    tl.store(normed_out + r * D + d, (normed * weight).to(dtype), mask=inside)
