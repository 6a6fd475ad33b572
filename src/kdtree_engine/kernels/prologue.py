"""Device functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """First statement of every kernel: let the next grid take its place, wait for the one before.

    Every kernel waits, so a grid that has ended implies that all before it have.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def product(a, b, acc, PRECISE: tl.constexpr):
    """acc + a b on the tensor cores; float32 operands without rounding to tf32."""
    if PRECISE:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc
