"""The least kernels whose warps hand numbers over: what racecheck makes of them, right and wrong.

A group of four warps writes 512 numbers to shared memory and arrives at a barrier there; another
one reads them. `waits`: it waits at that barrier first, as it must; else it may read what is not
there yet. `late`: which of the two rests for about two milliseconds before. `meets`: which of the
groups meets twice more by itself (`bar.sync` of its 128 threads) before all else, which says
nothing to the other group. A tool that follows such kernels reports those that do not wait and no
other; the names of kernels, as it prints them, say which is which.

Two more kernels have no roles: all warps write, then read what another one wrote, with a barrier
of all threads between or without. A tool that sees these accesses reports the second.

    python benches/sanitize.py --parts handover        on an sm_90; racecheck's exit is 1 by design
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

PROGRAMS, COUNT = 64, 512
# Four numbers a thread: plain stores and loads, not the matrix ones, which the tool may not see.
LANES = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


CONTROL = """
extern "C" __global__ void plain_NAME(int* out) {
    __shared__ int numbers[512];
    numbers[threadIdx.x] = threadIdx.x + blockIdx.x + 1;
    MEETING
    out[blockIdx.x * 512 + 511 - threadIdx.x] = numbers[511 - threadIdx.x];
}
"""
"""CUDA, since Triton puts the meeting there by itself."""


def _name(specialization: Any) -> str:
    """handed_waits_late_writer_meets_reader, and so on."""
    given = specialization.constants
    waits = "waits" if given["WAITS"] else "runs"
    return f"handed_{waits}_late_{given['LATE']}_meets_{given['MEETS']}"


@gluon.jit
def rest(i):
    """i, about two milliseconds later (`nanosleep` may end at half or twice its time)."""
    return gl.inline_asm_elementwise(
        "{ nanosleep.u32 1000000; nanosleep.u32 1000000; mov.u32 $0, $1; }",
        "=r,r",
        [i],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def meet(MORE: gl.constexpr):
    """A group's warps meet twice, if so wanted."""
    if MORE:
        gl.thread_barrier()
        gl.thread_barrier()


@gluon.jit
def write(numbers, written, out, WAITS: gl.constexpr, LATE: gl.constexpr, MEETS: gl.constexpr):
    """Four warps: the numbers. Groups are given the same arguments, also those they do not use."""
    meet(MEETS == "writer")
    i = gl.arange(0, 512, LANES)
    if LATE == "writer":
        i = rest(i)
    numbers.store(i + gl.program_id(0) + 1)
    gl.thread_barrier()
    mbarrier.arrive(written)


@gluon.jit
def read(numbers, written, out, WAITS: gl.constexpr, LATE: gl.constexpr, MEETS: gl.constexpr):
    """Four warps: the numbers go to out [programs, 512]."""
    meet(MEETS == "reader")
    i = gl.arange(0, 512, LANES)
    if LATE == "reader":
        i = rest(i)
    if WAITS:
        mbarrier.wait(written, 0)
    gl.store(out + gl.program_id(0) * 512 + i, numbers.load(LANES))


@gluon.jit(repr=_name)
def handed(out, WAITS: gl.constexpr, LATE: gl.constexpr, MEETS: gl.constexpr):
    """From one group to the other."""
    numbers = gl.allocate_shared_memory(gl.int32, [512], LINE)
    written = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(written, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (write, (numbers, written, out, WAITS, LATE, MEETS)),
            (read, (numbers, written, out, WAITS, LATE, MEETS)),
        ],
        [4],
        [64],
    )


# Those that do not wait first: what a right one left in shared memory would look right there, too.
VARIANTS = tuple(
    itertools.product((False, True), ("writer", "reader"), ("writer", "reader", "none"))
)


def run(device: torch.device) -> None:
    """All kernels, and how many of the numbers they read were right, in a line each."""
    program = torch.arange(PROGRAMS, device=device, dtype=torch.int32)[:, None] + 1
    expected = program + torch.arange(COUNT, device=device, dtype=torch.int32)

    def report(name: str, out: torch.Tensor) -> None:
        right = int((out == expected).sum())
        print(f"{name}: {right} of {expected.numel()} right", flush=True)

    for name, meeting in (("runs", ""), ("waits", "__syncthreads();")):
        out = torch.zeros_like(expected)
        source = CONTROL.replace("NAME", name).replace("MEETING", meeting)
        kernel = torch.cuda._compile_kernel(source, f"plain_{name}")
        kernel((PROGRAMS, 1, 1), (COUNT, 1, 1), (out,))
        report(f"plain_{name}", out)
    for waits, late, meets in VARIANTS:
        out = torch.zeros_like(expected)
        handed[(PROGRAMS,)](out, waits, late, meets, num_warps=4)
        report(f"handed, waits {waits}, {late} late, {meets} meets more", out)
