"""Best-first draft trees, ancestor bits and the step's rows, one warp a request; beside them, on
multiprocessors that would idle, bounds of the noise that sampling will read.

    log_probs, tokens [R, H, K]  ->  tokens, parents, depths, scores, bits [R, N], N = budget + 1

The reference pops a heap. Here the frontier has one slot a row of the tree: slot p holds the best
child of row p that is not yet in the tree, for the children of a row enter by rising rank. Each
step takes the best slot: the popped child's next sibling replaces it, and the new row opens its
own slot. So N <= 64 slots suffice and a slot's number is its candidate's parent.

Order among equal scores, by rank tuples, a prefix before its extensions. Of two candidates below
rows p and q: where q descends from p, it does so through a child that is in the tree, of a smaller
rank than p's candidate, so q's candidate comes first; else p's subtree lies on one side of q's.
That is the order in which a walk leaves the rows (postorder). A row enters as the last child so
far of its parent, so directly before it: `place` is kept by adding one to all behind. No tuple is
compared, and H is bounded only by the width of a field.

A float64 score is compared as two int32 halves of its order-preserving integer, since a warp's
maximum of int32 is one instruction (redux.sync). Additions are the reference's, in its order. What
the loop reads, the check of the order has brought near.

A step is one warp's latency, so few things wait for one another. A slot holds, beside its
candidate, what popping that brings: its next sibling and its first child. So the new frontier is
known with the winner, and what its two new candidates will bring (loads and additions) is worked
out beside the search for the next winner. Mostly one slot alone has the largest upper half; only
where several have it, lower halves and places are compared.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdtree_engine.kernels.gumbel.kernel import store_bounds
from kdtree_engine.kernels.prologue import begin

LOWEST = tl.constexpr(-2147483648)  # high half of an empty slot; no finite score has it
HIGHEST = tl.constexpr(2147483647)


@triton.jit
def _order(score):
    """int64 in the order of float64 scores, none of which is -0."""
    bits = score.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _high(score):
    return (_order(score) >> 32).to(tl.int32)


@triton.jit
def _low(score):
    """Lower half, with its top bit flipped: signed comparison then orders it as unsigned."""
    return _order(score).to(tl.int32) ^ LOWEST


@triton.jit
def _score(high, low):
    """The float64 of two halves."""
    order = (high.to(tl.int64) << 32) | ((low ^ LOWEST).to(tl.int64) & 0xFFFFFFFF)
    return (order ^ ((order >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)


@triton.jit
def _finite(value):
    return (value > float("-inf")) & (value < float("inf"))


@triton.jit
def _halves(score):
    """Both halves of a candidate's score; an empty slot's, where it is not finite."""
    order = score.to(tl.int64, bitcast=True)
    finite = ((order >> 52) & 0x7FF) != 0x7FF
    return tl.where(finite, _high(score), LOWEST), _low(score)


@triton.jit
def _put(mask, score, high, low):
    """The slots' halves; where `mask`, those of a score."""
    new_high, new_low = _halves(score)
    return tl.where(mask, new_high, high), tl.where(mask, new_low, low)


@triton.jit
def _largest(mask, word):
    return tl.max(tl.where(mask, word, LOWEST), 0)


@triton.jit
def _disordered(values, H, K, HP: tl.constexpr, KP: tl.constexpr):
    """Whether some row has a finite candidate after a smaller or a non-finite one."""
    depth, rank = tl.arange(0, HP)[:, None], tl.arange(0, KP)[None, :]
    inside = (depth < H) & (rank + 1 < K)
    here = tl.load(values + depth * K + rank, mask=inside, other=0.0)
    after = tl.load(values + depth * K + rank + 1, mask=inside, other=float("-inf"))
    wrong = _finite(after) & ((after > here) | (here != here) | (here == float("inf")))
    return tl.max(tl.max(wrong.to(tl.int32), 0), 0) > 0


@triton.jit
def _sort(values, names, to_values, to_names, H, K, KP: tl.constexpr):
    """Each row in stable descending order, non-finite candidates last and as -inf."""
    column = tl.arange(0, KP)
    base = 0
    while base < H * K:
        mine = tl.load(values + base + column, mask=column < K, other=float("-inf"))
        other = tl.load(values + base + column[None, :], mask=column[None, :] < K, other=0.0)
        mine = tl.where(_finite(mine), mine, float("-inf"))
        other = tl.where(_finite(other), other, float("-inf"))
        earlier = (other == mine[:, None]) & (column[None, :] < column[:, None])
        before = ((other > mine[:, None]) | earlier) & (column[None, :] < K)
        rank = tl.sum(before.to(tl.int32), 1)
        name = tl.load(names + base + column, mask=column < K, other=0)
        tl.store(to_values + base + rank, mine, mask=column < K)
        tl.store(to_names + base + rank, name, mask=column < K)
        base += K


@triton.jit
def _noise(
    noise, seeds, contexts, temperature, piece, requests, reach, vocab, BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """A helper's share of the bounds: pieces of 4 BLOCK tokens of one row, from `piece` on."""
    pieces = tl.cdiv(vocab, 4 * BLOCK)
    while piece < requests * reach * pieces:
        line = piece // pieces
        request = line // reach
        if tl.load(temperature + request) > 0:
            position = tl.load(contexts + request).to(tl.int64) + 1 + line % reach
            out = noise + line.to(tl.int64) * vocab
            first = piece % pieces * BLOCK
            store_bounds(tl.load(seeds + request), position, first, out, vocab, BLOCK, FAST)
        piece += tl.num_programs(0) - requests


@triton.jit
def tree_kernel(
    log_probs,  # [R, H, K] float32
    tokens,  # [R, H, K] int64
    sorted_values,  # scratch like log_probs, written only where a row is out of order
    sorted_names,  # scratch like tokens
    depth_limit,  # [R] int64 or None
    node_limit,  # [R] int64 or None
    row_tokens,  # [R, N] int64, from here on outputs
    parents,  # [R, N] int64
    depths,  # [R, N] int64
    scores,  # [R, N] float64
    nodes,  # [R] int64
    bits,  # [R, N] int64
    roots,  # [R] int64 or None; with it the inputs and outputs below
    contexts,  # [R] int32
    scratch,  # [R] int64, slot of row 0
    step_tokens,  # [R, N] int64
    positions,  # [R, N] int64
    slots,  # [R, N] int64
    seeds,  # [R] int64 or None; with it the next two
    temperature,  # [R] float32
    noise,  # [R, reach, vocab] float16: see bounds_kernel in kernels/gumbel
    requests,
    reach,
    vocab,
    H,
    K,
    width,  # ranks that may be used: min(K, budget), 1 for a chain
    budget,
    last_position,
    HP: tl.constexpr,  # powers of two from H, K and N
    KP: tl.constexpr,
    NP: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R + helpers): a request a program, then the helpers, where there is noise to bound."""
    begin(PDL)
    if seeds is not None:
        helper = tl.program_id(0) - requests
        if helper >= 0:
            _noise(noise, seeds, contexts, temperature, helper, requests, reach, vocab, BLOCK, FAST)
            return
    request = tl.program_id(0).to(tl.int64)
    values, names = log_probs + request * H * K, tokens + request * H * K
    deepest, most = request * 0 + H, request * 0 + budget  # int64, whatever the specialisation
    if depth_limit is not None:
        deepest = tl.minimum(deepest, tl.load(depth_limit + request))
    if node_limit is not None:
        most = tl.minimum(most, tl.load(node_limit + request))
    if roots is not None:  # read here, so that one wait covers all
        root = tl.load(roots + request)
        context = tl.load(contexts + request).to(tl.int64)
        first_slot = tl.load(scratch + request)
    deepest, most = tl.maximum(deepest, 0).to(tl.int32), tl.maximum(most, 0).to(tl.int32)
    if _disordered(values, H, K, HP, KP):
        to_values, to_names = sorted_values + request * H * K, sorted_names + request * H * K
        _sort(values, names, to_values, to_names, H, K, KP)
        tl.debug_barrier()
        values, names = to_values, to_names

    row = tl.arange(0, NP)
    none = float("-inf")
    # The root has been popped: its score, and the numbers below it. No sum is -0, but of two -0.
    score = tl.full([], 0.0, tl.float64)
    old = tl.full([], none, tl.float32)
    first, second = old, old
    under = tl.load(values, mask=(deepest > 0) & (width > 0), other=none)
    beside = tl.load(values + 1, mask=(deepest > 0) & (width > 1), other=none)
    below = tl.load(values + K, mask=(deepest > 1) & (width > 0), other=none)
    opening, opening_low = _halves(score + under.to(tl.float64))
    # each slot's candidate, the sibling after it, its first child
    high, low = tl.where(row == 0, opening, LOWEST), tl.where(row == 0, opening_low, LOWEST)
    side_high, side_low = row * 0 + LOWEST, row * 0
    down_high, down_low = row * 0 + LOWEST, row * 0
    # place << 19 | depth << 12 | rank << 6 | slot, of the slot's candidate
    about = tl.where(row == 0, 1 << 12, row)
    # of the rows made: `about` as it was, and the score's halves
    about_of, high_of, low_of = row * 0 - 1, row * 0, row * 0
    # Ancestor bits in two words; int32 sums of a warp are one instruction, too.
    bits_low = tl.where(row < 32, 1, 0) << (row & 31)
    bits_high = tl.where(row >= 32, 1, 0) << (row & 31)

    slot = most * 0 - 1
    made = most * 0  # rows made so far, the root aside
    most = tl.where(opening == LOWEST, 0, most)
    while made < most:
        best = tl.max(high, 0)
        # what popping the two newest candidates will bring
        sibling, child = score - old + first, score + under
        popped, fresh = row == slot, row == made
        side_high, side_low = _put(popped, sibling - first + second, side_high, side_low)
        down_high, down_low = _put(popped, sibling + under, down_high, down_low)
        side_high, side_low = _put(fresh, child - under + beside, side_high, side_low)
        down_high, down_low = _put(fresh, child + below, down_high, down_low)

        leading = high == best
        best_low = _largest(leading, low)
        winner = tl.min(tl.where(leading, about, HIGHEST), 0)
        made += 1
        if winner != tl.max(tl.where(leading, about, -1), 0):  # several lead
            winner = tl.min(tl.where(leading & (low == best_low), about, HIGHEST), 0)
            if best == LOWEST:  # all slots are empty: no row is made, and the loop ends
                made, winner = made * 0 + NP, winner * 0 + (1 << 12)
        slot, rank, depth = winner & 63, (winner >> 6) & 63, (winner >> 12) & 127
        here, beneath = values + ((depth - 1) * K + rank), values + depth * K
        old = tl.load(here)
        first = tl.load(here + 1, mask=rank + 1 < width, other=none)
        second = tl.load(here + 2, mask=rank + 2 < width, other=none)
        under = tl.load(beneath, mask=depth < deepest, other=none)
        beside = tl.load(beneath + 1, mask=(depth < deepest) & (width > 1), other=none)
        below = tl.load(beneath + K, mask=depth + 1 < deepest, other=none)

        popped, fresh = about == winner, row == made
        child_high, child_low = _largest(popped, down_high), _largest(popped, down_low)
        high = tl.where(popped, side_high, tl.where(fresh, child_high, high))
        low = tl.where(popped, side_low, tl.where(fresh, child_low, low))
        score = _score(best, best_low)
        about_of = tl.where(fresh, winner, about_of)
        high_of, low_of = tl.where(fresh, best, high_of), tl.where(fresh, best_low, low_of)
        bits_low |= tl.where(fresh, tl.sum(tl.where(popped, bits_low, 0), 0), 0)
        bits_high |= tl.where(fresh, tl.sum(tl.where(popped, bits_high, 0), 0), 0)
        about += tl.where(popped, 1 << 6, 0) + tl.where((about >> 19) >= (winner >> 19), 1 << 19, 0)
        opened = (winner & ~0x7FFFF) | ((depth + 1) << 12) | made
        about = tl.where(fresh, opened, about)

    node = about_of >= 0
    depth_of = tl.where(node, (about_of >> 12) & 127, 0)
    from_of = (depth_of - 1) * K + ((about_of >> 6) & 63)
    score_of = tl.where(row == 0, 0.0, none).to(tl.float64)
    score_of = tl.where(node, _score(high_of, low_of), score_of)
    rows = budget + 1
    out, kept = request * rows + row, row < rows
    tl.store(nodes + request, tl.sum(node.to(tl.int32), 0).to(tl.int64))
    name_of = tl.load(names + from_of, mask=node, other=-1)
    tl.store(row_tokens + out, name_of, mask=kept)
    tl.store(parents + out, tl.where(node, about_of & 63, -1).to(tl.int64), mask=kept)
    tl.store(depths + out, depth_of.to(tl.int64), mask=kept)
    tl.store(scores + out, score_of, mask=kept)
    whole = (bits_high.to(tl.int64) << 32) | (bits_low.to(tl.int64) & 0xFFFFFFFF)
    tl.store(bits + out, whole, mask=kept)
    if roots is not None:
        step_token = tl.where(row == 0, root, tl.maximum(name_of, 0))
        tl.store(step_tokens + out, step_token, mask=kept)
        position = tl.minimum(context + depth_of, last_position)
        tl.store(positions + out, position, mask=kept)
        tl.store(slots + out, first_slot + row, mask=kept)
