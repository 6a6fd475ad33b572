"""The least kernels whose warps have roles, one right and one wrong: what racecheck makes of them.

Four warps rest, write 128 numbers to shared memory and arrive at a barrier there; four others read
the numbers. In `waited` they wait at the barrier first, in `unwaited` they do not, so what they
read is not there yet. A tool that follows such kernels says nothing of the first and reports the
second. Run by `benches/sanitize.py --parts handover`, on an sm_90.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

PROGRAMS, COUNT = 64, 128
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def rest(i):
    """i, two milliseconds later."""
    return gl.inline_asm_elementwise(
        "{ nanosleep.u32 1000000; nanosleep.u32 1000000; mov.u32 $0, $1; }",
        "=r,r",
        [i],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def write(numbers, written, out, WAITS: gl.constexpr):
    """Four warps: the numbers, late."""
    numbers.store(rest(gl.arange(0, 128, LANES)) + gl.program_id(0))
    gl.thread_barrier()
    mbarrier.arrive(written)


@gluon.jit
def read(numbers, written, out, WAITS: gl.constexpr):
    """Four warps: the numbers go to out [programs, 128]."""
    if WAITS:
        mbarrier.wait(written, 0)
    i = gl.arange(0, 128, LANES)
    gl.store(out + gl.program_id(0) * 128 + i, numbers.load(LANES))


@gluon.jit
def waited(out):
    """The right one."""
    numbers = gl.allocate_shared_memory(gl.int32, [128], LINE)
    written = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(written, count=1)
    fence_async_shared()
    given = (numbers, written, out, gl.constexpr(True))
    gl.warp_specialize([(write, given), (read, given)], [4], [64])


@gluon.jit
def unwaited(out):
    """The wrong one."""
    numbers = gl.allocate_shared_memory(gl.int32, [128], LINE)
    written = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(written, count=1)
    fence_async_shared()
    given = (numbers, written, out, gl.constexpr(False))
    gl.warp_specialize([(write, given), (read, given)], [4], [64])


def run(device: torch.device) -> None:
    """Both kernels, and what they read, in a line each."""
    program = torch.arange(PROGRAMS, device=device, dtype=torch.int32)[:, None]
    expected = program + torch.arange(COUNT, device=device, dtype=torch.int32)
    for kernel in (waited, unwaited):
        out = torch.zeros_like(expected)
        kernel[(PROGRAMS,)](out, num_warps=4)
        right = int((out == expected).sum())
        print(f"{kernel.__name__}: {right} of {expected.numel()} numbers right", flush=True)
