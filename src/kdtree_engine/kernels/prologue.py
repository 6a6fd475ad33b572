"""Device functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Every kernel begins so: wait for the grid before, then let the next one take its place.

    Every kernel waits, so a grid that has ended implies that all before it have. In this order one
    grid at most waits beside the one that runs; letting the next in before waiting piles up the
    whole step's grids on the SMs and made it 1.5 times slower (docs/log.md).
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def product(a, b, acc, PRECISE: tl.constexpr):
    """acc + a b on the tensor cores; float32 operands without rounding to tf32."""
    if PRECISE:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc
