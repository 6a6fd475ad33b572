"""The blocks of attention on Hopper (sm_90), in Gluon: warps with roles of their own.

The sums are those of kernel.py, in its order, so with its bits: an MMA's accumulator does not know
its tile, and what lies between the products is elementwise. Here it decides speed alone: in one
program of kernel.py all warps score a tile, then all add its values, and the tensor cores wait for
the softmax between. Here three groups of four warps share a tile of 64 columns:

    score   s = q k; the weights go where the keys' rope part lay, which nobody needs any more; the
            factors by which sums shrink beside them; keeps the maximum and the mass
    value   two groups, 256 value columns each: a = a shrink + w v

Keys come by the copy engine (TMA), two tiles deep, in four pieces of latent columns and the rope
part. A value group copies its own two pieces of the tile after the next as soon as it has added a
tile; the second one, when the first is done too, the rope part. Barriers, of each stage: `full`
(one for each of the five parts), `ready` (the weights), `done` (the first value group's, for the
second).

While the values of one tile are added, the next one is scored. For trees of bfloat16 rows over
latents of 512 + 64 numbers; everything else goes through kernel.py. Keys lie in whole tiles, which
are all written: nothing is masked.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kdtree_engine.kernels.mla_attention.kernel import LOWEST, ONES, TILE, block_at, block_of
from kdtree_engine.kernels.prologue import begin

# A program has TILE columns, as many as a tile has keys.
KV = gl.constexpr(512)
ROPE = gl.constexpr(64)
PIECE = gl.constexpr(128)  # latent columns that are copied at once; a group of warps adds two
PIECES = gl.constexpr(4)
STAGES = gl.constexpr(2)
QUERY_BYTES = gl.constexpr(TILE.value * (KV.value + ROPE.value) * 2)

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
MASS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, MASS, 2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def pause(step, DELAYS: gl.constexpr):
    """For tests: each warp rests for up to 2 us, as its clock has it. A wait that is missing, or
    one that is too late, then shows in the bits.
    """
    if DELAYS:
        gl.inline_asm_elementwise(
            """{
            .reg .u32 t;
            mov.u32 t, %clock;
            mul.lo.u32 t, t, 0x9E3779B1;
            shr.u32 t, t, 21;
            nanosleep.u32 t;
            mov.u32 $0, $1;
            }""",
            "=r,r",
            [step],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """So many barriers that one arrival completes."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def tile_after(turn, t, end, chunk, chunks, blocks, length, ZONES: gl.constexpr):
    """(turn, tile, end) of the tile after this one, of a chunk's list."""
    ended = t + 1 >= end
    turn += ended.to(gl.int32)
    _, start, end = block_at(turn, chunk, chunks, blocks, length, ZONES)
    return turn, gl.where(ended, start, t + 1), end


@gluon.jit
def copy(keys, page, first, to, full):
    """Columns from `first` on of a page's 64 keys, to shared memory; `full` will say so."""
    mbarrier.expect(full, keys.block_type.nbytes)
    tma.async_copy_global_to_shared(keys, [page * TILE, first], full, to)


@gluon.jit
def score_tile(q_latent, q_rope, latent, rope, full, stage, phase):
    """q k of 64 columns and 64 keys, piece by piece as they come; the latent's dimensions first."""
    s = gl.zeros([TILE, TILE], gl.float32, SCORES)
    for piece in gl.static_range(PIECES):
        mbarrier.wait(full[piece].index(stage), phase)
        s = warpgroup_mma(
            q_latent.slice(piece * PIECE, PIECE, 1),
            latent.index(stage * PIECES + piece).permute((1, 0)),
            s,
            use_acc=piece > 0,
            is_async=True,
        )
    mbarrier.wait(full[PIECES].index(stage), phase)
    s = warpgroup_mma(q_rope, rope.index(stage).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def score_part(queries, query_rows, latent, rope, shrinks, q_latent, q_rope, ones, full, ready,
               q_full, high, mass, scale, column, columns, last, chunk, chunks, blocks, length,
               turns, steps, ZONES: gl.constexpr, DELAYS: gl.constexpr):  # fmt: skip
    """Four warps: scores, weights, the factors of the sums; a block's maximum and mass.

    scale is positive, so the largest scaled score is the largest score, scaled.
    """
    i = column + gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    j = column + gl.arange(0, TILE, gl.SliceLayout(1, MASS))
    factor = gl.full([TILE, TILE], 0.0, gl.float32, SCORES) + scale
    if steps > 0:
        queried = q_full.index(0)
        mbarrier.expect(queried, QUERY_BYTES)
        tma.async_copy_global_to_shared(queries, [column, 0], queried, q_latent)
        tma.async_copy_global_to_shared(query_rows, [column, KV], queried, q_rope)
        mbarrier.wait(queried, 0)
    step = chunk - chunk
    for turn in range(turns):
        block, first, final = block_at(turn, chunk, chunks, blocks, length, ZONES)
        m = gl.full([TILE], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        n = gl.zeros([TILE, ONES], gl.float32, MASS)
        for _ in range(first, final):
            stage = step % STAGES
            pause(step, DELAYS)
            s = score_tile(q_latent, q_rope, latent, rope, full, stage, step // STAGES & 1)
            top = gl.maximum(m, gl.max(s, 1) * scale)
            shift = gl.expand_dims(-top, 1) + gl.zeros([TILE, TILE], gl.float32, SCORES)
            weight = gl.exp2(gl.fma(s, factor, shift)).to(gl.bfloat16)
            shrink = gl.exp2(m - top)
            m = top
            pause(step, DELAYS)
            gl.thread_barrier()  # all warps have scored: the rope part may go
            pause(step, DELAYS)
            rope.index(stage).store(weight)
            shrinks.index(stage).store(shrink)
            fence_async_shared()
            pause(step, DELAYS)
            gl.thread_barrier()
            mbarrier.arrive(ready.index(stage))
            less = gl.convert_layout(shrink, gl.SliceLayout(1, MASS))
            n = warpgroup_mma(
                gl.convert_layout(weight, WEIGHTS),
                ones.permute((1, 0)),
                n * gl.expand_dims(less, 1),
            )
            step += 1
        if final > first:
            at = block * columns
            gl.store(high + at + i, m, mask=i < last)
            gl.store(mass + at + j, gl.max(n, 1), mask=j < last)


@gluon.jit
def value_part(key_rows, rope_rows, latent, rope, shrinks, full, ready, done, values, table, column,
               columns, last, chunk, chunks, blocks, length, turns, steps, HALF: gl.constexpr,
               ZONES: gl.constexpr, DELAYS: gl.constexpr):  # fmt: skip
    """Four warps: the weighted sums of two pieces of value columns, and the copies of these pieces.

    The second group waits for the first one, and copies the rope part too: both have read the
    weights that lie there.
    """
    LEFT: gl.constexpr = HALF * 2
    RIGHT: gl.constexpr = HALF * 2 + 1
    ahead = chunk - chunk
    _, t, end = block_at(ahead, chunk, chunks, blocks, length, ZONES)
    for early in gl.static_range(STAGES):
        if early < steps:
            page = gl.load(table + t)
            for piece in gl.static_range(LEFT, RIGHT + 1):
                place = latent.index(early * PIECES + piece)
                copy(key_rows, page, piece * PIECE, place, full[piece].index(early))
            if HALF == 1:
                copy(rope_rows, page, KV, rope.index(early), full[PIECES].index(early))
        ahead, t, end = tile_after(ahead, t, end, chunk, chunks, blocks, length, ZONES)
    following = gl.load(table + t, mask=steps > STAGES, other=0)
    a = gl.zeros([TILE, PIECE], gl.float32, VALUES)
    b = gl.zeros([TILE, PIECE], gl.float32, VALUES)
    step = chunk - chunk
    for turn in range(turns):
        block, first, final = block_at(turn, chunk, chunks, blocks, length, ZONES)
        for tile in range(first, final):
            stage = step % STAGES
            phase = step // STAGES & 1
            left = latent.index(stage * PIECES + LEFT)
            right = latent.index(stage * PIECES + RIGHT)
            weight = rope.index(stage)
            mbarrier.wait(full[LEFT].index(stage), phase)
            mbarrier.wait(full[RIGHT].index(stage), phase)
            mbarrier.wait(ready.index(stage), phase)
            pause(step, DELAYS)
            more = step + STAGES < steps
            begun = tile > first
            shrink = gl.expand_dims(shrinks.index(stage).load(gl.SliceLayout(1, VALUES)), 1)
            a = warpgroup_mma(weight, left, a * shrink, use_acc=begun, is_async=True)
            b = warpgroup_mma(weight, right, b * shrink, use_acc=begun, is_async=True)
            pause(step, DELAYS)
            a = warpgroup_mma_wait(1, [a])
            gl.thread_barrier()  # all warps have read this piece, which nobody else adds
            if more:
                copy(key_rows, following, LEFT * PIECE, left, full[LEFT].index(stage))
            b = warpgroup_mma_wait(0, [b])
            pause(step, DELAYS)
            gl.thread_barrier()
            if HALF == 0:
                mbarrier.arrive(done.index(stage))
            if more:
                copy(key_rows, following, RIGHT * PIECE, right, full[RIGHT].index(stage))
                if HALF == 1:
                    mbarrier.wait(done.index(stage), phase)
                    pause(step, DELAYS)
                    gl.thread_barrier()  # none still waits when the next use of `done` can come
                    copy(rope_rows, following, KV, weight, full[PIECES].index(stage))
                ahead, t, end = tile_after(ahead, t, end, chunk, chunks, blocks, length, ZONES)
                following = gl.load(table + t, mask=step + STAGES + 1 < steps, other=0)
            step += 1
        if final > first:
            i = column + gl.arange(0, TILE, gl.SliceLayout(1, VALUES))
            d = LEFT * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, VALUES))
            at = values + (block * columns + gl.expand_dims(i, 1)) * KV + gl.expand_dims(d, 0)
            inside = gl.expand_dims(i < last, 1)
            gl.store(at, a, mask=inside)
            gl.store(at + PIECE, b, mask=inside)


@gluon.jit
def popcount(x):
    """Bits set of int64 x."""
    return gl.inline_asm_elementwise(
        "popc.b64 $0, $1;", "=r,l", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def own_places(places, ancestors, slots, page, committed, count, span, tile, HEADS: gl.constexpr,
               ROWS: gl.constexpr):  # fmt: skip
    """Where the keys of a column tile's rows lie; see kernel.own_places."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = tile * TILE // HEADS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    known = gl.expand_dims((row < count) & (row * HEADS < (tile + 1) * TILE), 1)
    j = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    bits = gl.load(ancestors + span * count + row, mask=row < count, other=0)
    one = gl.full([1, TILE], 1, gl.int64, layout)
    bits = gl.expand_dims(bits, 1) & ((one << count - 1 << 1) - 1)  # [ROWS, 64], columns alike
    column = gl.expand_dims(j, 0)
    wide = column.to(gl.int64)
    on = ((bits >> wide) & 1) != 0
    rank = popcount(bits & ((one << wide) - 1))  # ancestors before row j of the span
    start = places + gl.expand_dims((span * count + row) * (2 * TILE), 1)
    shared = (page * TILE + wide) * (2 * TILE) + wide
    gl.store(start + column, shared + bits * 0, mask=known & (column < committed))
    slot = gl.load(slots + span * count + j, mask=j < count, other=0)
    mine = gl.expand_dims(slot, 0) * (2 * TILE) + TILE + wide
    gl.store(start + committed + rank, mine + bits * 0, mask=known & on)
    total = committed + popcount(bits)
    none = gl.full([ROWS, TILE], -1, gl.int64, layout)
    gl.store(start + column, none, mask=known & (column >= total))
    gl.store(start + TILE + column, none, mask=known & (column + TILE >= total))


@gluon.jit
def gather_piece(row, wanted, latent):
    """128 columns of 64 keys, from row [64, 64] on, to shared memory: both halves at once."""
    early = gl.load(row, mask=wanted, other=0.0)
    late = gl.load(row + ROPE, mask=wanted, other=0.0)
    latent.slice(0, ROPE, 1).store(early)
    latent.slice(ROPE, ROPE, 1).store(late)


@gluon.jit
def own_scores(queries, query_rows, latents, slots, contexts, pages, ancestors, scores, places,
               count, width, first, end, stride, q_latent, q_rope, latent, rope, own_full,
               HEADS: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Every stride-th unit: scores of 64 columns on 64 keys, of those that are some row's own.

    See kernel.own_scores.
    """
    tiles = gl.cdiv(count * HEADS, TILE)
    k = gl.arange(0, TILE, gl.SliceLayout(1, GATHER))
    e = gl.arange(0, ROPE, gl.SliceLayout(0, GATHER))
    r = gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    c = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    queried = own_full.index(0)
    full = (own_full, own_full, own_full, own_full, own_full)
    phase = first - first
    for unit in range(first, end, stride):
        which = unit % 2
        tile = unit // 2 % tiles
        span = unit // (2 * tiles)
        column = span * count * HEADS + tile * TILE
        gl.thread_barrier()  # what these buffers held has been read
        mbarrier.expect(queried, QUERY_BYTES)
        tma.async_copy_global_to_shared(queries, [column, 0], queried, q_latent)
        tma.async_copy_global_to_shared(query_rows, [column, KV], queried, q_rope)
        slot = gl.load(slots + span * count + k, mask=k < count, other=0)
        context = gl.load(contexts + span)
        committed = context % TILE
        at = pages + span.to(gl.int64) * width + context // TILE
        page = gl.load(at, mask=committed > 0, other=0).to(gl.int64)
        key = gl.where(which == 0, page * TILE + k, slot)
        wanted = gl.expand_dims(k < gl.where(which == 0, committed, count), 1)
        row = latents + gl.expand_dims(key * (KV + ROPE), 1) + gl.expand_dims(e, 0)
        last = gl.load(row + KV, mask=wanted, other=0.0)
        for piece in gl.static_range(PIECES):
            gather_piece(row + piece * PIECE, wanted, latent.index(piece))
        rope.index(0).store(last)
        fence_async_shared()
        gl.thread_barrier()
        s = score_tile(q_latent, q_rope, latent, rope, full, 0, phase)
        phase = phase ^ 1
        inside = gl.expand_dims(tile * TILE + r < count * HEADS, 1)
        to = ((column + r) * 2 + which) * TILE
        gl.store(scores + gl.expand_dims(to, 1) + gl.expand_dims(c, 0), s, mask=inside)
        if which == 1:
            own_places(places, ancestors, slots, page, committed, count, span, tile, HEADS, ROWS)


@gluon.jit(do_not_specialize=["count", "columns", "width", "chunks", "shared"])
def role_partials(key_rows, rope_rows, queries, query_rows, latents, slots, contexts, pages,
                  ancestors, values, high, mass, scores, places, scale, count, columns, width,
                  chunks, shared, HEADS: gl.constexpr, ZONES: gl.constexpr, ROWS: gl.constexpr,
                  DELAYS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """kernel.partials for trees of bfloat16: programs 0..shared-1 take blocks.

    key_rows, rope_rows: descriptors of the latents [slots, 576], for tiles of [64, 128] and
    [64, 64]; queries, query_rows: of the query [R * HEADS, 576], for [64, 512] and [64, 64].
    """
    begin(PDL)
    index = gl.program_id(0)
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [TILE, KV], SWIZZLED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [TILE, ROPE], SWIZZLED)
    latent = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PIECES, TILE, PIECE], SWIZZLED)
    rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, ROPE], SWIZZLED)
    shrinks = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], LINE)
    one = gl.full([ONES, TILE], 1.0, gl.bfloat16, GATHER)
    ones = gl.allocate_shared_memory(gl.bfloat16, [ONES, TILE], SWIZZLED, one)
    # An allocation each: between two uses of one the compiler makes a group of warps meet.
    full = (
        barriers(STAGES),
        barriers(STAGES),
        barriers(STAGES),
        barriers(STAGES),
        barriers(STAGES),
    )
    ready, done = barriers(STAGES), barriers(STAGES)
    q_full, own_full = barriers(gl.constexpr(1)), barriers(gl.constexpr(1))
    fence_async_shared()

    tiles = gl.cdiv(count * HEADS, TILE)
    tile = index % tiles
    spans = columns // (count * HEADS)
    span = index // tiles % spans
    chunk = index // (tiles * spans)
    length = gl.load(contexts + span) // TILE * TILE
    blocks = gl.where(length > 0, block_of(length - 1, ZONES) + 1, 0)
    turns = gl.where(index < shared, gl.cdiv(blocks, chunks), 0)
    steps = chunk - chunk
    for turn in range(turns):
        _, start, end = block_at(turn, chunk, chunks, blocks, length, ZONES)
        steps += end - start
    column = span * count * HEADS + tile * TILE
    last = (span + 1) * count * HEADS
    table = pages + span.to(gl.int64) * width
    gl.warp_specialize(
        [
            (score_part, (queries, query_rows, latent, rope, shrinks, q_latent, q_rope, ones, full,
                          ready, q_full, high, mass, scale, column, columns, last, chunk, chunks,
                          blocks, length, turns, steps, ZONES, DELAYS)),
            (value_part, (key_rows, rope_rows, latent, rope, shrinks, full, ready, done,
                          values, table, column, columns, last, chunk, chunks, blocks, length,
                          turns, steps, gl.constexpr(0), ZONES, DELAYS)),
            (value_part, (key_rows, rope_rows, latent, rope, shrinks, full, ready, done,
                          values, table, column, columns, last, chunk, chunks, blocks, length,
                          turns, steps, gl.constexpr(1), ZONES, DELAYS)),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip
    # Own keys: two units for each further program, the rest one by one after the blocks.
    units = spans * tiles * 2
    further = gl.num_programs(0) - shared
    first, end, stride = 2 * further + index, units, shared
    if index >= shared:
        first, end, stride = index - shared, gl.minimum(units, 2 * further), further
    own_scores(
        queries, query_rows, latents, slots, contexts, pages, ancestors, scores, places, count,
        width, first, end, stride, q_latent, q_rope, latent, rope, own_full, HEADS, ROWS,
    )  # fmt: skip
