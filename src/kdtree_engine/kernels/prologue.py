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
def prefetch(pointer, count):
    """Ask for `count` bytes from `pointer` on, both multiples of 16, to be brought into the L2.

    One thread asks for the whole run. Before `begin` this overlaps a weight's way from memory with
    the grid before, most of all where that one is short of work for the memory; it may only name
    what no kernel of the step writes.
    """
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [pointer.to(tl.int64), count],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def product(a, b, acc, PRECISE: tl.constexpr):
    """acc + a b on the tensor cores; float32 operands without rounding to tf32."""
    if PRECISE:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc
