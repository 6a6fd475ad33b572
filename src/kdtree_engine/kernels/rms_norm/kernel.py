"""y = round(x / sqrt(mean(x^2) + eps)) * weight, one row a program.

The sum of squares is a tl.sum, whose order follows the layout: the width and the number of warps
are therefore constants of the row's width (`norm_shape`), never of the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin


@triton.jit
def norm_scale(x, D, eps):
    """1 / sqrt(mean(x^2) + eps) of x [BLOCK] float32, zeros beyond D."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / D + eps)


@triton.jit
def rms_norm_rows(
    x_ptr, weight_ptr, out_ptr, D, x_stride, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """x [R, D] with rows x_stride apart, weight [D], out [R, D]. grid (R,)."""
    begin(PDL)
    r = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    x = tl.load(x_ptr + r * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    normed = (x * norm_scale(x, D, eps)).to(dtype)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    tl.store(out_ptr + r * D + d, (normed * weight).to(dtype), mask=inside)
