"""Expert choice, and the blocks of choices that the expert products run over.

    logits [R, E]   = parts[0] + parts[1] + ...            parts [S, R, N] float32, added in order
    scores          = 1 / (1 + exp(-logits))
    choice          = scores + bias, -inf outside the best groups; NaN counts as -inf
    experts [R, k]  = the k largest of choice, the smaller index where equal
    weights [R, k]  = scores of those / (their sum in the order of choice + 1e-20) * scale
    shared [R, Is]  = silu(columns E .. E + Is) * (columns E + Is .. E + 2 Is), of the same parts

Floats are compared as int32 of the same order: an integer maximum over a warp is one instruction.
Every float sum here is elementwise and in a fixed order, so no result depends on a layout.

Blocks: sorting expert * P + slot brings the slots of an expert together, rising; a scan counts
each slot's rank in its expert's run; every T-th rank starts a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.prologue import begin
from kdtree_engine.kernels.swiglu.kernel import silu_times

TAKEN = tl.constexpr(-(2**31))  # below every value: chosen already, or padding
LOWEST = tl.constexpr(-2139095041)  # -inf
LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def ordered(x):
    """int32 that compares as float32 x does; NaN is -inf."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)


@triton.jit
def unordered(key):
    """The float32 that `ordered` made `key` of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def take_best(key, index):
    """The largest of key [.., P], its index (the smallest where equal), and key without it."""
    axis: tl.constexpr = len(key.shape) - 1
    best = tl.max(key, axis, keep_dims=True)
    at = tl.min(tl.where(key == best, index, LARGEST), axis, keep_dims=True)
    return best, at, tl.where(index == at, TAKEN, key)


@triton.jit
def keep_top_groups(
    key, valid, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """key [G * P] with -inf outside the best groups, by the sum of a group's two best."""
    member = tl.broadcast_to(tl.arange(0, P)[None, :], (G, P))
    best, _, rest = take_best(tl.reshape(key, (G, P)), member)
    score = unordered(best)
    if GROUP_SIZE > 1:
        score += unordered(tl.max(rest, 1, keep_dims=True))
    group = tl.arange(0, G)
    scores = tl.where(group < GROUPS, ordered(tl.reshape(score, (G,))), TAKEN)
    kept = tl.zeros((G,), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        _, at, scores = take_best(scores, group)
        kept = tl.where(group == at, 1, kept)
    kept = tl.reshape(tl.broadcast_to(kept[:, None], (G, P)), (G * P,))
    return tl.where((kept == 0) & valid, LOWEST, key)


@triton.jit
def choose(
    parts, bias, experts_out, weights_out, row, rows, columns, SEGMENTS: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr, SCALE: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Experts and weights of a row, stored; the experts [K] are returned as well."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    place = tl.arange(0, G * P)
    # Without groups the columns of a thread are known to be neighbours: wide loads.
    column, valid = place, place < EXPERTS
    if GROUPS > 1:
        group, member = place // P, place % P
        column, valid = group * SIZE + member, (member < SIZE) & (group < GROUPS)
    offset = tl.load(bias + column, mask=valid, other=0.0)
    logits = tl.zeros((G * P,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        line = parts + (segment * rows + row).to(tl.int64) * columns
        logits += tl.load(line + column, mask=valid, other=0.0)
    index = tl.where(valid, column, LARGEST)
    scores = tl.div_rn(tl.full((G * P,), 1.0, tl.float32), tl.exp(-logits) + 1.0)
    key = tl.where(valid, ordered(scores + offset), TAKEN)
    if GROUPS > 1:
        key = keep_top_groups(key, valid, GROUPS, TOP_GROUPS, SIZE, G, P)
    bits = scores.to(tl.int32, bitcast=True)
    choice = tl.arange(0, K)
    experts = tl.zeros((K,), tl.int32)
    weights = tl.zeros((K,), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for i in tl.static_range(TOP_K):
        _, at, key = take_best(key, index)
        # One value and TAKEN elsewhere: the maximum picks it out, NaN included.
        own = tl.max(tl.where(index == at, bits, TAKEN), 0, keep_dims=True)
        score = own.to(tl.float32, bitcast=True)
        total += score
        experts = tl.where(choice == i, at, experts)
        weights = tl.where(choice == i, score, weights)
    if NORMALISE:
        weights = tl.div_rn(weights, tl.broadcast_to(total + 1e-20, (K,)))
    weights = weights * SCALE
    real = choice < TOP_K
    tl.store(experts_out + row * TOP_K + choice, experts, mask=real)
    tl.store(weights_out + row * TOP_K + choice, weights, mask=real)
    return experts


@triton.jit
def swiglu_shared(
    parts, shared, index, rows, columns, SEGMENTS: tl.constexpr, EXPERTS: tl.constexpr,
    INNER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Tile `index` of the shared expert's inner values: one row, WIDTH of its INNER columns."""
    TILES: tl.constexpr = (INNER + WIDTH - 1) // WIDTH
    row = index // TILES
    column = (index % TILES) * WIDTH + tl.arange(0, WIDTH)
    inside = column < INNER
    gate = tl.zeros((WIDTH,), tl.float32)
    up = tl.zeros((WIDTH,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        line = parts + (segment * rows + row).to(tl.int64) * columns + EXPERTS + column
        gate += tl.load(line, mask=inside, other=0.0)
        up += tl.load(line + INNER, mask=inside, other=0.0)
    value = silu_times(gate, up)
    to = shared + row.to(tl.int64) * INNER + column
    tl.store(to, value.to(shared.dtype.element_ty), mask=inside)


@triton.jit
def add_to_run(a, b):
    """Scan over sorted (expert << 16 | count): the length of the run of equal experts so far."""
    return tl.where((a >> 16) == (b >> 16), a + (b & 0xFFFF), b)


@triton.jit
def make_blocks(
    experts, slot, slots, block_expert, block_slots, BOUND: tl.constexpr, BOUND_P: tl.constexpr,
    P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Blocks of the choices experts [P] of slot [P]; slots that are not below `slots` are none."""
    key = tl.sort(tl.where(slot < slots, experts * P + slot, LARGEST))
    real = key < LARGEST
    expert = tl.where(real, key // P, 0x7FFF)
    rank = (tl.associative_scan((expert << 16) | 1, 0, add_to_run) & 0xFFFF) - 1
    first = real & (rank % T == 0)
    block = tl.cumsum(first.to(tl.int32), 0) - 1
    used = tl.sum(first.to(tl.int32), 0)
    b = tl.arange(0, BOUND_P)
    tl.store(block_expert + b, b * 0 - 1, mask=(b >= used) & (b < BOUND))
    t = tl.arange(0, T)
    empty = tl.zeros((BOUND_P, T), tl.int32) + slots
    tl.store(block_slots + b[:, None] * T + t[None, :], empty, mask=(b < BOUND)[:, None])
    tl.debug_barrier()  # the same places are written again, by other threads
    tl.store(block_expert + block, expert, mask=first)
    tl.store(block_slots + block * T + rank % T, key % P, mask=real)


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    parts, bias, experts, weights, shared, block_expert, block_slots, rows, columns,
    SEGMENTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, NORMALISE: tl.constexpr, SCALE: tl.constexpr,
    SHARED_INNER: tl.constexpr, SHARED_WIDTH: tl.constexpr, ALONE: tl.constexpr,
    T: tl.constexpr, G: tl.constexpr, P: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row a program; where it is ALONE, each choice is a block, stored too.

    Programs beyond the rows take the shared expert's tiles.
    """
    begin(PDL)
    program = tl.program_id(0)
    if program < rows:
        chosen = choose(
            parts, bias, experts, weights, program, rows, columns, SEGMENTS, EXPERTS, TOP_K,
            GROUPS, TOP_GROUPS, NORMALISE, SCALE, G, P, K,
        )  # fmt: skip
        if ALONE:
            choice, t = tl.arange(0, K), tl.arange(0, T)
            real = choice < TOP_K
            tl.store(block_expert + choice, chosen, mask=real)
            own = tl.where(t[None, :] == 0, choice[:, None], TOP_K)
            tl.store(block_slots + choice[:, None] * T + t[None, :], own, mask=real[:, None])
    elif SHARED_INNER > 0:
        swiglu_shared(
            parts, shared, program - rows, rows, columns, SEGMENTS, EXPERTS, SHARED_INNER,
            SHARED_WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["slots"])
def group_kernel(
    experts, block_expert, block_slots, slots, BOUND: tl.constexpr, BOUND_P: tl.constexpr,
    P: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: blocks of the choices experts [slots], slots <= P."""
    begin(PDL)
    slot = tl.arange(0, P)
    chosen = tl.load(experts + slot, mask=slot < slots, other=0)
    make_blocks(chosen, slot, slots, block_expert, block_slots, BOUND, BOUND_P, P, T)
