"""Attention kernels on the GPU: near float32, and the same bits for trees, runs, rows and cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels.mla_attention import launch
from kdtree_engine.kernels.mla_attention.launch import Tiling, attend
from kdtree_engine.kernels.mla_attention.plan import TILE, TablePlan
from kdtree_engine.types import SpanTable

pytestmark = pytest.mark.gpu

KV, ROPE, HEADS, SCALE = 512, 64, 8, 0.14467963
WIDTH = KV + ROPE
# Every instance that a small device also holds; the wider ones are benches/ops/mla_attention.py's.
CUTS = (Tiling(16), Tiling(16, fold_width=32, fold_batch=4, fold_warps=2))
ROLES = Tiling(64, apart=True, ahead=True, roles=True)  # trees on Hopper, of K2.6's widths
PARENTS = [-1, 0, 0, 1, 2, 2, 4, 6, 6, 8]


@pytest.fixture(autouse=True)
def nothing_is_left_over() -> Iterator[None]:
    """Memory that no kernel has written yet is NaN in every call, not what the call before left:
    a cut that forgets a block does not find another's.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory
    yield
    torch.use_deterministic_algorithms(False)


def cuts() -> tuple[Tiling, ...]:
    if torch.cuda.get_device_capability() >= (12, 0):
        return CUTS
    return (
        *CUTS,
        *([ROLES] if torch.cuda.get_device_capability() == (9, 0) else []),
        Tiling(16, stages=3, ahead=True),
        Tiling(32, stages=3),
        Tiling(64, apart=True, ahead=True),
        Tiling(64, apart=True, ahead=True, short=16),
        Tiling(64, fold_width=128),
    )


def text(length: int, heads: int = HEADS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    make = torch.Generator("cuda").manual_seed(1)
    keys = torch.randn(length, width, generator=make, device="cuda")
    queries = torch.randn(length, heads, width, generator=make, device="cuda") * 0.3
    return keys.bfloat16(), queries.bfloat16()


def path_of(parents: Sequence[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def run(
    keys: Tensor, queries: Tensor, context: int, tokens: Tensor, parents: Sequence[int] | None,
    cut: Tiling | None = None, seed: int = 0, value_dim: int = KV,
) -> Tensor:  # fmt: skip
    """One request: a causal run of `tokens`, or a tree of them. Unused memory is NaN."""
    rows, width = len(tokens), (context + len(tokens)) // TILE + 3
    latents = torch.full((width + 2, TILE, keys.shape[1]), torch.nan, device="cuda").to(keys.dtype)
    flat = latents.view(-1, keys.shape[1])
    make = torch.Generator().manual_seed(seed)
    order = torch.randperm(width + 1, generator=make).int().cuda()
    pages = order[None, :width].contiguous()
    at = torch.arange(context + rows, device="cuda")
    where = pages[0][at // TILE].long() * TILE + at % TILE
    flat[where[:context]] = keys[:context]
    own, masks = where[context:], None
    if parents is not None:
        own = int(order[width]) * TILE + torch.arange(rows, device="cuda")
        bits = [sum(1 << j for j in path_of(parents, row)) for row in range(rows)]
        signed = [word - (1 << 64) if word >> 63 else word for word in bits]
        masks = torch.tensor([signed], device="cuda")
    flat[own] = keys[tokens]
    contexts = torch.tensor([context], dtype=torch.int32, device="cuda")
    plan = TablePlan(SpanTable(contexts, pages, masks), own, rows)
    return attend(queries[tokens].contiguous(), latents, plan, SCALE, value_dim, cut)


@pytest.mark.parametrize("context", [0, 63, 126, 1025, 2046, 9000])
def test_trees_runs_rows_and_cuts_agree(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = text(context + 400)
    path = path_of(PARENTS, len(PARENTS) - 1)
    tokens = torch.arange(context + 200, context + 200 + len(PARENTS), device="cuda")
    tokens[path] = torch.arange(context, context + len(path), device="cuda")
    follow = torch.arange(context, context + 300, device="cuda")
    expected = run(keys, queries, context, follow, None)[: len(path)]
    seen = keys[: context + len(path)].float()
    scores = queries[context + len(path) - 1].float() @ seen.T * SCALE
    truth = torch.softmax(scores, -1) @ seen[:, :KV]
    assert (expected[-1].float() - truth).norm() < 6e-3 * truth.norm()
    for cut in (None, *cuts()):
        tree = run(keys, queries, context, tokens, PARENTS, cut, seed=2)
        assert torch.isfinite(tree).all()
        assert torch.equal(tree[path], expected), cut
        single = run(keys, queries, context + 2, follow[2:3], [-1], cut)
        assert torch.equal(single[0], expected[2]), cut
        assert torch.equal(run(keys, queries, context, follow[:64], None, cut)[:4], expected[:4])
    for places in (4, 1000):  # programs at once: many blocks in each, or a block in each
        name = "kdtree_engine.kernels.mla_attention.launch.multiprocessors"
        monkeypatch.setattr(name, lambda device, places=places: places)
        for cut in (None, *cuts()):
            tree = run(keys, queries, context, tokens, PARENTS, cut)
            assert torch.equal(tree[path], expected), (places, cut)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("context", [50, 100, 300, 2040])
def test_the_packaged_model(context: int, dtype: torch.dtype) -> None:
    """4 heads of 64 + 32. In float32 there is no MMA: nothing may be fused in one kernel only."""
    keys, queries = (part.to(dtype) for part in text(context + 64, 4, 96))
    tokens = torch.arange(context, context + 16, device="cuda")
    expected = run(keys, queries, context, tokens, None, value_dim=64)
    scores = queries[context + 15].float() @ keys[: context + 16].float().T * SCALE
    truth = torch.softmax(scores, -1) @ keys[: context + 16, :64].float()
    assert (expected[-1].float() - truth).norm() < 6e-3 * truth.norm()
    for cut in (None, CUTS[0], cuts()[-2]):
        chain = run(keys, queries, context, tokens, range(-1, 15), cut, value_dim=64)
        assert torch.equal(chain, expected), cut
    single = run(keys, queries, context + 9, tokens[9:10], [-1], value_dim=64)
    assert torch.equal(single[0], expected[9])


def requests(
    keys: Tensor, queries: Tensor, contexts: Sequence[int], count: int
) -> tuple[Tensor, Tensor, TablePlan]:
    """Queries, latents and plan of requests that decode chains of `count` rows."""
    width = max(contexts) // TILE + 3
    total = len(contexts) * width
    latents = torch.full((total, TILE, WIDTH), torch.nan, device="cuda").bfloat16()
    order = torch.randperm(total, generator=torch.Generator().manual_seed(3)).int().cuda()
    pages = order.view(len(contexts), width)
    slots, query = [], []
    for place, context in enumerate(contexts):
        at = torch.arange(context + count, device="cuda")
        where = pages[place][at // TILE].long() * TILE + at % TILE
        latents.view(-1, WIDTH)[where] = keys[at]
        slots.append(where[context:])
        query.append(queries[context : context + count])
    chain = [(2 << row) - 1 if row < 63 else -1 for row in range(count)]  # int64: 64 ones are -1
    masks = torch.tensor([chain] * len(contexts), device="cuda")
    table = SpanTable(torch.tensor(contexts, dtype=torch.int32, device="cuda"), pages, masks)
    plan = TablePlan(table, torch.cat(slots), len(contexts) * count)
    return torch.cat(query), latents, plan


def test_requests_of_different_lengths_do_not_meet() -> None:
    contexts, count = [4000, 0, 130], 4
    keys, queries = text(4100)
    query, latents, plan = requests(keys, queries, contexts, count)
    alone = []
    for context in contexts:
        tokens = torch.arange(context, context + count, device="cuda")
        alone.append(run(keys, queries, context, tokens, None))
    for cut in (None, *cuts()):
        result = attend(query, latents, plan, SCALE, KV, cut)
        assert torch.equal(result, torch.cat(alone)), cut


@pytest.mark.parametrize(("heads", "count"), [(8, 9), (12, 10), (24, 7), (64, 1), (128, 3)])
def test_roles_serve_any_heads(heads: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that end inside a row, rows wider than a tile, several spans and passes; and a tile
    reads the queries of the next span, which are no business of its own.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warps with roles need an sm_90")
    contexts = [4000, 0, 130, 63, 9000]
    keys, queries = text(9100, heads)
    query, latents, plan = requests(keys, queries, contexts, count)
    expected = attend(query, latents, plan, SCALE, KV, Tiling(64, apart=True, ahead=True))
    assert torch.isfinite(expected).all()
    assert torch.equal(attend(query, latents, plan, SCALE, KV, ROLES), expected)
    assert launch.tiling(heads * count, False, launch.has_roles(query, latents, KV)).roles
    spoilt = query.clone()
    spoilt[count : 2 * count] = torch.nan
    result = attend(spoilt, latents, plan, SCALE, KV, ROLES)
    assert torch.equal(result[:count], expected[:count])
    assert torch.equal(result[2 * count :], expected[2 * count :])
    monkeypatch.setattr(launch, "_MOST_BYTES", 1 << 22)  # a span or two at a time
    assert torch.equal(attend(query, latents, plan, SCALE, KV, ROLES), expected)


@pytest.mark.parametrize("count", [8, 20, 64])
def test_roles_in_any_order(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps that rest at random, so that groups meet in many orders."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warps with roles need an sm_90")
    keys, queries = text(9100)
    query, latents, plan = requests(keys, queries, [0, 63, 64, 130, 200, 4000, 9000], count)
    expected = attend(query, latents, plan, SCALE, KV, Tiling(64, apart=True, ahead=True))
    monkeypatch.setattr(launch, "_DELAYS", True)
    for _ in range(30):
        assert torch.equal(attend(query, latents, plan, SCALE, KV, ROLES), expected)


def test_a_chain_of_64_rows() -> None:
    keys, queries = text(2000)
    tokens = torch.arange(1407, 1471, device="cuda")
    chain = run(keys, queries, 1407, tokens, range(-1, 63))
    assert torch.equal(chain, run(keys, queries, 1407, tokens, None))


def test_an_unused_place_of_a_step_is_finite() -> None:
    latents = torch.full((4, TILE, WIDTH), torch.nan, device="cuda").bfloat16()
    latents[3] = 0.0
    contexts = torch.zeros(2, dtype=torch.int32, device="cuda")
    pages = torch.full((2, 64), 3, dtype=torch.int32, device="cuda")
    for count in (4, 16):
        masks = torch.zeros(2, count, dtype=torch.int64, device="cuda")
        slots = torch.full((2 * count,), 3 * TILE, device="cuda")
        plan = TablePlan(SpanTable(contexts, pages, masks), slots, 2 * count)
        query = torch.randn(2 * count, HEADS, WIDTH, device="cuda").bfloat16()
        assert torch.equal(
            attend(query, latents, plan, SCALE, KV), torch.zeros_like(query[..., :KV])
        )
