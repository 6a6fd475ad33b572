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
    """The largest of key [R, P], its index (the smallest where equal), and key without it."""
    best = tl.max(key, 1)
    at = tl.min(tl.where(key == best[:, None], index[None, :], LARGEST), 1)
    return best, at, tl.where(index[None, :] == at[:, None], TAKEN, key)


@triton.jit
def keep_top_groups(
    key, valid, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """key [R, G * P] with -inf outside the best groups, by the sum of a group's two best."""
    member = tl.arange(0, P)
    best, _, rest = take_best(tl.reshape(key, (R * G, P)), member)
    score = unordered(best)
    if GROUP_SIZE > 1:
        score += unordered(tl.max(rest, 1))
    group = tl.arange(0, G)
    scores = tl.where(group[None, :] < GROUPS, ordered(tl.reshape(score, (R, G))), TAKEN)
    kept = tl.zeros((R, G), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        _, at, scores = take_best(scores, group)
        kept = tl.where(group[None, :] == at[:, None], 1, kept)
    kept = tl.reshape(tl.broadcast_to(kept[:, :, None], (R, G, P)), (R, G * P))
    return tl.where((kept == 0) & valid[None, :], LOWEST, key)


@triton.jit
def choose(
    parts, bias, experts_out, weights_out, row, rows, columns, SEGMENTS: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr, SCALE: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Experts and weights of rows `row` [R], stored; the experts [R, K] are returned as well."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    place = tl.arange(0, G * P)
    group, member = place // P, place % P
    valid = (member < SIZE) & (group < GROUPS)
    index = tl.where(valid, group * SIZE + member, LARGEST)
    inside = valid[None, :] & (row < rows)[:, None]
    logits = tl.zeros((R, G * P), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        line = (segment * rows + row).to(tl.int64) * columns
        logits += tl.load(parts + line[:, None] + index[None, :], mask=inside, other=0.0)
    scores = tl.div_rn(tl.full((R, G * P), 1.0, tl.float32), tl.exp(-logits) + 1.0)
    offset = tl.load(bias + index, mask=valid, other=0.0)
    key = tl.where(valid[None, :], ordered(scores + offset[None, :]), TAKEN)
    if GROUPS > 1:
        key = keep_top_groups(key, valid, GROUPS, TOP_GROUPS, SIZE, R, G, P)
    bits = scores.to(tl.int32, bitcast=True)
    choice = tl.arange(0, K)
    experts = tl.zeros((R, K), tl.int32)
    weights = tl.zeros((R, K), tl.float32)
    total = tl.zeros((R,), tl.float32)
    for i in tl.static_range(TOP_K):
        _, at, key = take_best(key, index)
        # One value and TAKEN elsewhere: the maximum picks it out, NaN included.
        own = tl.max(tl.where(index[None, :] == at[:, None], bits, TAKEN), 1)
        score = own.to(tl.float32, bitcast=True)
        total += score
        here = choice[None, :] == i
        experts = tl.where(here, at[:, None], experts)
        weights = tl.where(here, score[:, None], weights)
    if NORMALISE:
        weights = tl.div_rn(weights, tl.broadcast_to((total + 1e-20)[:, None], (R, K)))
    weights = weights * SCALE
    real = (row < rows)[:, None] & (choice < TOP_K)[None, :]
    to = row[:, None] * TOP_K + choice[None, :]
    tl.store(experts_out + to, experts, mask=real)
    tl.store(weights_out + to, weights, mask=real)
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
    value = gate / (tl.exp(-gate) + 1.0) * up
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
    SHARED_INNER: tl.constexpr, SHARED_WIDTH: tl.constexpr, FUSED: tl.constexpr,
    BOUND: tl.constexpr, BOUND_P: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows a program. FUSED: program 0 has all rows and makes their blocks too.

    Programs beyond the rows take the shared expert's tiles.
    """
    begin(PDL)
    program = tl.program_id(0)
    routing = (rows + R - 1) // R
    if program < routing:
        row = program * R + tl.arange(0, R)
        chosen = choose(
            parts, bias, experts, weights, row, rows, columns, SEGMENTS, EXPERTS, TOP_K, GROUPS,
            TOP_GROUPS, NORMALISE, SCALE, R, G, P, K,
        )  # fmt: skip
        if FUSED:
            if R == 1:  # each choice is a block of its own
                choice = tl.arange(0, K)
                real = choice < TOP_K
                tl.store(block_expert + choice, tl.reshape(chosen, (K,)), mask=real)
                t = tl.arange(0, T)
                own = tl.where(t[None, :] == 0, choice[:, None], TOP_K)
                to = block_slots + choice[:, None] * T + t[None, :]
                tl.store(to, own, mask=real[:, None])
            else:
                place = tl.arange(0, R * K)
                slot = tl.where(place % K < TOP_K, place // K * TOP_K + place % K, LARGEST)
                flat = tl.reshape(chosen, (R * K,))
                make_blocks(
                    flat, slot, rows * TOP_K, block_expert, block_slots, BOUND, BOUND_P, R * K, T
                )
    elif SHARED_INNER > 0:
        swiglu_shared(
            parts, shared, program - routing, rows, columns, SEGMENTS, EXPERTS, SHARED_INNER,
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
