"""Attention kernels in Triton's interpreter: near the reference, one order for every cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.kernels.mla_attention import mla_attention, plan_attention
from kdtree_engine.kernels.mla_attention.blocks import BORDERS, block_of, first_key, zones
from kdtree_engine.kernels.mla_attention.launch import Tiling, attend
from kdtree_engine.kernels.mla_attention.plan import TablePlan
from kdtree_engine.kernels.tree_mask import tree_mask
from kdtree_engine.types import SpanTable, StepInputs

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernel = pytest.importorskip("kdtree_engine.kernels.mla_attention.kernel")
if torch.cuda.is_available():
    pytest.skip("kernels compile here; tests/gpu has their tests", allow_module_level=True)

HEADS, KV, ROPE = 2, 16, 16
SCALE = 0.13
SMALL = zones(((128, 64), (512, 128), (1 << 30, 256)))  # blocks whose borders a short text meets
CUT = Tiling(columns=16, warps=4, stages=1, fold_batch=4, zones=SMALL)
FROZEN = replace(CUT, zones=zones())
BRANCHING = (-1, 0, 0, 2)


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that add term by term onto the accumulator, as an MMA's bits do not depend on tiles.

    The interpreter's own go through NumPy, whose order follows the shape of the operands.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[k]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@dataclass
class Step:
    query: Tensor
    latents: Tensor
    inputs: StepInputs

    def kernels(self, cut: Tiling = CUT, value_dim: int = KV) -> Tensor:
        table = self.inputs.spans
        assert isinstance(table, SpanTable)
        plan = TablePlan(table, self.inputs.slots, int(self.inputs.tokens.shape[0]))
        return attend(self.query, self.latents, plan, SCALE, value_dim, cut)

    def reference(self, value_dim: int = KV) -> Tensor:
        plan = plan_attention(self.inputs, (self.latents.shape[0] - 1) * PAGE_SIZE)
        return mla_attention(self.query, self.latents, plan, SCALE, value_dim)


def text(
    length: int, seed: int = 0, heads: int = HEADS, width: int = KV + ROPE
) -> tuple[Tensor, Tensor]:
    """Keys [length, width] and queries [length, heads, width] of a text; scores spread near 1."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(length, width, generator=generator)
    return keys, torch.randn(length, heads, width, generator=generator)


def step(
    keys: Tensor, queries: Tensor, contexts: Sequence[int], parents: Sequence[int] | None, rows: int
) -> Step:
    """One step of a request per context, all of the same text; every other cell of memory is NaN.

    parents None: a causal run of `rows`. The tree's row of depth d stands for token context + d of
    the text on one path (each row's last child), other tokens elsewhere.
    """
    width, spans = max(contexts) // PAGE_SIZE + 2 + rows // PAGE_SIZE, len(contexts)
    total = spans * (width + 1) + 1
    latents = torch.full((total, PAGE_SIZE, keys.shape[1]), torch.nan)
    latents[total - 1] = 0.0
    flat = latents.view(-1, keys.shape[1])
    free = torch.randperm(total - 1, generator=torch.Generator().manual_seed(total)).tolist()
    pages = torch.full((spans, width), total - 1, dtype=torch.int32)
    slots, query, masks = [], [], []
    for place, context in enumerate(contexts):
        covered = context + (rows if parents is None else 0)
        for page in range(-(-covered // PAGE_SIZE)):
            pages[place, page] = free.pop()
        at = torch.arange(covered)
        where = pages[place][at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE
        flat[where[:context]] = keys[:context]
        if parents is None:
            own, tokens = where[context:], torch.arange(context, context + rows)
        else:
            own = free.pop() * PAGE_SIZE + torch.arange(rows)
            tokens = tokens_of(parents, context)
            masks.append(tree_mask(torch.tensor(parents)[None])[0])
        flat[own] = keys[tokens]
        slots.append(own)
        query.append(queries[tokens])
    ids = torch.zeros(spans * rows, dtype=torch.int64)
    table = SpanTable(
        torch.tensor(contexts, dtype=torch.int32),
        pages,
        None if parents is None else torch.stack(masks),
    )
    return Step(torch.cat(query), latents, StepInputs(ids, ids, torch.cat(slots), table, ids[:0]))


def path_of(parents: Sequence[int]) -> list[int]:
    """The rows from the root to the last row."""
    path, row = [], len(parents) - 1
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def tokens_of(parents: Sequence[int], context: int) -> Tensor:
    """The path to the last row is the text's; other rows are tokens from further on."""
    tokens = torch.arange(context + len(parents), context + 2 * len(parents))
    path = path_of(parents)
    tokens[path] = torch.arange(context, context + len(path))
    return tokens


def near(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-6)


def same_as_plain(context: int, cut: Tiling) -> None:
    """A tree's path, a causal run and its last row alone have the same bits, near the reference."""
    count = len(BRANCHING)
    keys, queries = text(context + 2 * count)
    tree = step(keys, queries, [context], BRANCHING, count)
    result = tree.kernels(cut)
    near(result, tree.reference())
    path = path_of(BRANCHING)
    causal = step(keys, queries, [context], None, len(path))
    run = causal.kernels(cut)
    near(run, causal.reference())
    assert torch.equal(result[path], run)
    last = context + len(path) - 1
    assert torch.equal(step(keys, queries, [last], (-1,), 1).kernels(cut)[0], run[-1])


@pytest.mark.parametrize("context", [0, 1, 63, 64, 127, 190, 257, 510, 767])
def test_tree_row_is_near_the_reference_and_has_the_bits_of_plain_decoding(context: int) -> None:
    same_as_plain(context, CUT)


@pytest.mark.parametrize("context", [127, 2047])
def test_the_frozen_blocks(context: int) -> None:
    same_as_plain(context, FROZEN)


def test_blocks_grow_and_have_closed_forms() -> None:
    table = zones()
    starts, size = [0], 0
    for end, size in BORDERS[:-1]:
        starts += range(starts[-1] + size, end, size)
        starts.append(end)
    starts += [starts[-1] + BORDERS[-1][1] * i for i in range(1, 99)]
    assert starts == sorted(set(starts))
    for block, start in enumerate(starts[:-1]):
        assert first_key(block, table) == start
        for key in (start, start + 1, starts[block + 1] - 1):
            assert block_of(key, table) == block
    assert [block_of(1 << bits, table) for bits in (12, 13, 15, 17, 18)] == [32, 48, 96, 192, 320]


def inspect(given: Any, out: Any, BLOCK: tl.constexpr, ZONES: tl.constexpr) -> None:
    value = tl.load(given)
    if BLOCK:
        tl.store(out, kernel.block_of(value, ZONES))
    else:
        tl.store(out, kernel.first_key(value, ZONES))


def test_the_device_knows_the_same_blocks() -> None:
    table, run = zones(), triton.jit(inspect)
    keys = [0, 127, 128, 2047, 2048, 8191, 8192, 32767, 32768, 200_000]
    for host, values in ((block_of, keys), (first_key, [0, 1, 15, 16, 17, 39, 40, 88, 89, 300])):
        for value in values:
            given, out = torch.tensor([value], dtype=torch.int32), torch.empty(1, dtype=torch.int32)
            run[(1,)](given, out, BLOCK=host is block_of, ZONES=table)
            assert out.item() == host(value, table), (host, value)


@pytest.mark.parametrize("parents", [None, BRANCHING])
def test_every_cut_has_the_same_bits(
    parents: Sequence[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few places for programs: each takes several blocks in turns."""
    context, wide = 460, replace(CUT, columns=64)
    keys, queries = text(context + 20)
    made = step(keys, queries, [context], parents, len(BRANCHING))
    expected = made.kernels()
    for places, cut in (
        (132, CUT),
        (5, CUT),
        (4, replace(wide, apart=True, ahead=True, fold_batch=3)),
        (5, replace(CUT, columns=8, fold_width=8)),
        (132, replace(wide, short=16)),
        (4, replace(CUT, short=2)),  # more narrow tiles than programs
    ):
        name = "kdtree_engine.kernels.mla_attention.launch.multiprocessors"
        monkeypatch.setattr(name, lambda device, places=places: places)
        assert torch.equal(made.kernels(cut), expected), (places, cut)


def test_a_long_run_has_the_bits_of_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = text(350, heads=1)
    made = step(keys, queries, [250], None, 70)
    wide = replace(CUT, columns=64)
    expected = made.kernels(wide)
    near(expected, made.reference())
    monkeypatch.setattr("kdtree_engine.kernels.mla_attention.launch._MOST_BYTES", 1)
    assert torch.equal(made.kernels(wide), expected)
    single = step(keys, queries, [319], None, 1)
    assert torch.equal(single.kernels()[0], expected[69])


def test_requests_of_different_lengths_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(BRANCHING)
    keys, queries = text(400, heads=1)
    contexts = [300, 0, 130]
    made = step(keys, queries, contexts, BRANCHING, count)
    result = made.kernels()
    near(result, made.reference())
    for place, context in enumerate(contexts):
        alone = step(keys, queries, [context], BRANCHING, count).kernels()
        assert torch.equal(result[place * count : (place + 1) * count], alone)
    monkeypatch.setattr("kdtree_engine.kernels.mla_attention.launch._MOST_BYTES", 1)
    assert torch.equal(made.kernels(), result)


def test_a_full_tree_of_64_rows() -> None:
    keys, queries = text(400, heads=1)
    made = step(keys, queries, [191], range(-1, 63), 64)
    result = made.kernels(replace(CUT, columns=64))
    near(result, made.reference())
    assert torch.equal(step(keys, queries, [254], None, 1).kernels()[0], result[63])


@pytest.mark.parametrize(("heads", "value_dim", "rope"), [(1, 16, 8), (3, 24, 8), (9, 40, 24)])
def test_odd_shapes(heads: int, value_dim: int, rope: int) -> None:
    keys, queries = text(200, heads=heads, width=value_dim + rope)
    made, narrow = step(keys, queries, [140], (-1, 0, 0), 3), replace(CUT, columns=8)
    result = made.kernels(narrow, value_dim)
    near(result, made.reference(value_dim))
    run = step(keys, queries, [140], None, 2)
    near(run.kernels(value_dim=value_dim), run.reference(value_dim))
    assert torch.equal(result[[0, 2]], run.kernels(value_dim=value_dim))


def test_an_unused_place_gives_finite_results() -> None:
    keys, queries = text(100)
    made = step(keys, queries, [70, 0], (-1, 0), 2)
    table = made.inputs.spans
    assert isinstance(table, SpanTable) and table.ancestors is not None
    null = made.latents.shape[0] - 1
    table.pages[1] = null
    table.ancestors[1] = 0
    made.inputs.slots[2:] = null * PAGE_SIZE
    result = made.kernels()
    assert torch.equal(result[2:], torch.zeros_like(result[2:]))
    assert torch.equal(result[:2], step(keys, queries, [70], (-1, 0), 2).kernels())
