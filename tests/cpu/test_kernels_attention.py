"""mla_attention: near float64, and by bits the same for runs, single rows, trees, pages, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from rowcheck import assert_far, assert_near
from torch import Tensor

from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.kernels.mla_attention import mla_attention, plan_attention
from kdtree_engine.kernels.mla_attention import reference as code
from kdtree_engine.kernels.mla_attention.cases import CASES, Case
from kdtree_engine.kernels.tree_mask import tree_mask
from kdtree_engine.types import Span, StepInputs

BY_CASE = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
TOLERANCE = 2e-6
BORDERS = (0, 1, 62, 63, 64, 65, 130, 446, 510, 511, 512, 513)


@dataclass
class Text:
    """Keys and queries of a text's tokens: key [T, D], query [T, heads, D], scores near N(0, 1)."""

    keys: Tensor
    queries: Tensor
    value_dim: int

    @property
    def scale(self) -> float:
        return self.keys.shape[1] ** -0.5


def make_text(case: Case, length: int, seed: int = 0) -> Text:
    generator = torch.Generator().manual_seed(seed)
    width = case.value_dim + case.rope_dim
    return Text(
        torch.randn(length, width, generator=generator),
        torch.randn(length, case.heads, width, generator=generator),
        case.value_dim,
    )


def truth(text: Text, path: Sequence[int], row: int, scale: float | None = None) -> Tensor:
    """Float64 attention of query `row` over the keys of `path`, [heads, value_dim]."""
    keys = text.keys[list(path)].double()
    scores = text.queries[row].double() @ keys.T * (text.scale if scale is None else scale)
    return torch.softmax(scores, -1) @ keys[:, : text.value_dim]


class Cache:
    """One layer of a cache full of NaN but for the null page; pages are handed out shuffled."""

    def __init__(self, width: int, dtype: torch.dtype, seed: int = 0, pages: int = 24) -> None:
        self.latents = torch.full((pages + 1, PAGE_SIZE, width), torch.nan, dtype=dtype)
        self.latents[pages] = 0.0
        self.null = pages * PAGE_SIZE
        self._free = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()

    def take(self, tokens: int) -> Tensor:
        """Pages that hold `tokens` tokens."""
        return torch.tensor([self._free.pop() for _ in range(-(-tokens // PAGE_SIZE))]).long()

    def store(self, slots: Tensor, keys: Tensor) -> None:
        self.latents.view(-1, keys.shape[1])[slots] = keys


def slots_of(pages: Tensor, positions: Tensor) -> Tensor:
    return pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE


@dataclass
class Part:
    """Rows of one request in a step: tokens `rows` of `text`, after the tokens `context`."""

    text: Text
    context: Sequence[int]
    rows: Sequence[int]
    parents: Sequence[int] | None = None  # of a tree, in terms of its rows


def attend(parts: Sequence[Part], seed: int = 0, padding: int = 0) -> list[Tensor]:
    """One step over the parts; the result of each."""
    keys = parts[0].text.keys
    cache = Cache(keys.shape[1], keys.dtype, seed)
    spans, slots, queries, first = [], [], [], 0
    for part in parts:
        before, count = len(part.context), len(part.rows)
        pages = cache.take(before + (count if part.parents is None else 0))
        cache.store(slots_of(pages, torch.arange(before)), part.text.keys[list(part.context)])
        if part.parents is None:
            own = slots_of(pages, torch.arange(before, before + count))
        else:
            own = cache.take(PAGE_SIZE) * PAGE_SIZE + torch.arange(count)
        cache.store(own, part.text.keys[list(part.rows)])
        spans.append(Span(first, count, before, pages, ancestors(part.parents)))
        slots.append(own)
        queries.append(part.text.queries[list(part.rows)])
        first += count
    query = torch.cat(queries)
    query = torch.cat((query, query[-1:].expand(padding, -1, -1)))
    rows = torch.zeros(first + padding, dtype=torch.int64)
    all_slots = torch.cat(slots)
    inputs = StepInputs(rows, rows, all_slots, tuple(spans), rows[:0])
    plan = plan_attention(inputs, cache.null)
    text = parts[0].text
    out = mla_attention(query, cache.latents, plan, text.scale, text.value_dim)
    assert out.shape == (first + padding, query.shape[1], text.value_dim)
    return [out[span.first : span.first + span.count] for span in spans] + [out[first:]]


def ancestors(parents: Sequence[int] | None) -> Tensor | None:
    if parents is None:
        return None
    return tree_mask(torch.tensor(parents)[None])[0]


def run(text: Text, context: int, count: int, seed: int = 0) -> Tensor:
    """Tokens context..context+count-1 as one causal run."""
    part = Part(text, range(context), range(context, context + count))
    return attend([part], seed)[0]


def random_parents(rows: int, seed: int) -> list[int]:
    """A tree that both branches and grows deep: parents near the end are likelier."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1]
    for row in range(1, rows):
        back = int(torch.rand((), generator=generator) ** 2 * min(row, 9))
        parents.append(row - 1 - back)
    return parents


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


@BY_CASE
def test_causal_run_against_float64(case: Case) -> None:
    text = make_text(case, case.context + case.rows)
    got = run(text, case.context, case.rows)
    positions = range(case.context, case.context + case.rows)
    want = torch.stack([truth(text, range(p + 1), p) for p in positions])
    tolerance = TOLERANCE * 2
    assert_near(got, want, tolerance)
    if case.context:  # mistakes that a test with narrow scores would not see
        lost = torch.stack([truth(text, range(1, p + 1), p) for p in positions])
        future = torch.stack([truth(text, [*range(p + 1), 0], p) for p in positions])
        scaled = torch.stack([truth(text, range(p + 1), p, text.scale * 1.01) for p in positions])
        for mistake in (lost, future, scaled):
            assert_far(mistake, want, tolerance)


@BY_CASE
def test_tree_against_float64(case: Case) -> None:
    text, parents = make_text(case, case.context + case.rows), random_parents(case.rows, seed=3)
    rows = range(case.context, case.context + case.rows)
    got = attend([Part(text, range(case.context), rows, parents)])[0]
    paths = [
        [*range(case.context), *(case.context + node for node in path_to(row, parents))]
        for row in range(case.rows)
    ]
    want = torch.stack([truth(text, path, path[-1]) for path in paths])
    assert_near(got, want, TOLERANCE * 2)
    if case.rows > 1:
        uncle = torch.stack([truth(text, sorted({*path, rows[1]}), path[-1]) for path in paths])
        assert_far(uncle, want, TOLERANCE)


@pytest.mark.parametrize("context", BORDERS)
def test_run_equals_row_by_row(context: int) -> None:
    """Any chunking of a prompt, down to one row a step, on other pages each time."""
    case = CASES[1]
    text = make_text(case, context + 70)
    whole = run(text, context, 70)
    for step in (1, 7, 64):
        pieces = [
            run(text, first, min(step, context + 70 - first), seed=first)
            for first in range(context, context + 70, step)
        ]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("context", BORDERS)
@pytest.mark.parametrize("shape", ["chain", "branching", "siblings"])
def test_tree_rows_equal_plain_decoding(context: int, shape: str) -> None:
    """Each node of a tree has the bits that plain decoding of its own path has there."""
    case = CASES[1]
    rows = 64
    parents = {
        "chain": [-1, *range(rows - 1)],
        "branching": random_parents(rows, seed=context),
        "siblings": [-1] + [0] * (rows - 1),
    }[shape]
    text = make_text(case, context + rows)
    tree = attend([Part(text, range(context), range(context, context + rows), parents)], seed=5)[0]
    if shape == "chain":
        assert torch.equal(tree, run(text, context, rows))
    for row in range(0, rows, 5 if shape == "chain" else 1):
        path = [*range(context), *(context + node for node in path_to(row, parents))]
        plain = attend([Part(text, path[:-1], path[-1:])], seed=row)[0]
        assert torch.equal(tree[row : row + 1], plain), f"row {row}"


@BY_CASE
def test_every_case_is_exact(case: Case) -> None:
    """The cases' own sizes: run, single rows and tree agree by bits."""
    total = case.context + case.rows
    text = make_text(case, total, seed=2)
    whole = run(text, case.context, case.rows)
    parents = [-1, *range(case.rows - 1)]
    chain = Part(text, range(case.context), range(case.context, total), parents)
    assert torch.equal(attend([chain], seed=9)[0], whole)
    for row in {0, case.rows // 2, case.rows - 1}:
        single = run(text, case.context + row, 1, seed=row + 1)
        assert torch.equal(single, whole[row : row + 1])


def test_requests_in_one_step_do_not_meet() -> None:
    """Runs and trees of several requests, in any order, with padding rows behind them."""
    case = CASES[1]
    texts = [make_text(case, 200, seed=seed) for seed in range(4)]
    parts = [
        Part(texts[0], range(100), range(100, 137)),
        Part(texts[1], range(63), range(63, 79), random_parents(16, 1)),
        Part(texts[2], range(0), range(1)),
        Part(texts[3], range(150), range(150, 158), random_parents(8, 2)),
    ]
    alone = [attend([part])[0] for part in parts]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        *together, padding = attend([parts[index] for index in order], seed=4, padding=5)
        for index, out in zip(order, together, strict=True):
            assert torch.equal(out, alone[index])
        assert torch.equal(padding, together[-1][-1:].expand(5, -1, -1))


def test_memory_limit_cuts_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[3]
    text = make_text(case, case.context + case.rows)
    parents = random_parents(case.rows, seed=1)
    tree = Part(text, range(case.context), range(case.context, len(text.keys)), parents)
    whole = run(text, case.context, case.rows), attend([tree])[0]
    for most in (1, 5_000, 20_000):
        monkeypatch.setattr(code, "_MOST_SCORES", most)
        assert torch.equal(run(text, case.context, case.rows), whole[0])
        assert torch.equal(attend([tree])[0], whole[1])


def test_bf16_cache_and_query() -> None:
    """bf16 operands are widened first: the float32 result of the same values, rounded once."""
    case = CASES[1]
    text = make_text(case, 80)
    rounded = Text(text.keys.bfloat16().float(), text.queries.bfloat16().float(), text.value_dim)
    want = run(rounded, 70, 10)
    low = Text(rounded.keys.bfloat16(), rounded.queries.bfloat16(), text.value_dim)
    assert torch.equal(run(low, 70, 10), want.bfloat16())


@pytest.mark.parametrize("tiles", [1, 2, 7, 8, 9, 16, 17, 20])
def test_tiles_are_added_in_order_inside_blocks_of_eight(tiles: int) -> None:
    sums = torch.randn(tiles, 5, generator=torch.Generator().manual_seed(tiles))
    total = None
    for first in range(0, tiles, 8):
        block = sums[first]
        for tile in range(first + 1, min(first + 8, tiles)):
            block = block + sums[tile]
        total = block if total is None else total + block
    folded = code.fold_tiles(sums)
    assert torch.equal(folded, total)
    # Tiles of masked keys add nothing, however many follow.
    longer = torch.cat((sums, torch.zeros(13, 5)))
    assert torch.equal(code.fold_tiles(longer), folded)
    if tiles > 8:
        assert not torch.equal(sums.flip(0).cumsum(0)[-1], folded)  # the order shows in the bits
