"""The kernels of tree_build, tree_mask, tree_accept and cache_commit, interpreted."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels import cache_commit
from kdtree_engine.kernels.cache_commit import cases as commit_cases
from kdtree_engine.kernels.cache_commit import reference as commit_reference
from kdtree_engine.kernels.gumbel import NoiseWanted, _launch_bounds
from kdtree_engine.kernels.tree_accept import _launch_accept, tree_accept
from kdtree_engine.kernels.tree_accept import cases as accept_cases
from kdtree_engine.kernels.tree_build import (
    BuiltTrees,
    TreePlaces,
    _fits,
    _launch_tree,
    plan_trees,
    tree_build,
)
from kdtree_engine.kernels.tree_build import cases as build_cases
from kdtree_engine.kernels.tree_mask import MAX_ROWS, _launch_mask, tree_mask
from kdtree_engine.kernels.tree_mask import cases as mask_cases

pytest.importorskip("triton")


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for name, one, other in zip(got._fields, got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), name


def compare(log_probs: Tensor, tokens: Tensor, budget: int, **options: object) -> BuiltTrees:
    want = tree_build(log_probs, tokens, budget, **options)
    trees, ancestors, rows, noise = _launch_tree(log_probs, tokens, budget, **options)
    assert_same(trees, want)
    assert torch.equal(ancestors, tree_mask(want.parents))
    assert rows is None and noise is None
    return want


FITTING = [name for name, case in build_cases.CASES.items() if case.budget < MAX_ROWS]


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("chain", [False, True])
def test_trees(name: str, chain: bool) -> None:
    case = build_cases.CASES[name]
    log_probs, tokens = (value[:2] for value in build_cases.inputs(case))
    assert _fits(log_probs, case.budget)
    compare(log_probs, tokens, case.budget, chain=chain)


def test_a_tree_has_the_same_bits_in_any_company() -> None:
    case = build_cases.CASES["wide"]
    log_probs, tokens = build_cases.inputs(case)
    whole = tree_build(log_probs, tokens, case.budget)
    for rows in (slice(3, 4), slice(6, 8)):
        alone = _launch_tree(log_probs[rows], tokens[rows], case.budget)[0]
        assert_same(alone, BuiltTrees(*(value[rows] for value in whole)))


@pytest.mark.parametrize("seed", range(6))
def test_ties_are_broken_by_the_rank_tuple(seed: int) -> None:
    """Many equal scores, deep trees: the places among slots must be those of the tuples."""
    draw = random.Random(seed)
    requests, horizon, width = 1, draw.choice([2, 5, 16, 40]), draw.choice([1, 2, 4, 30])
    values = draw.choice([[0.0], [0.0, -1.0], [-0.25, -0.5, -0.75]])
    shape = (requests, horizon, width)
    picks = torch.tensor([draw.choice(values) for _ in range(requests * horizon * width)])
    log_probs = picks.view(shape).sort(dim=-1, descending=True).values
    tokens = torch.arange(log_probs.numel()).view(shape)
    want = compare(log_probs, tokens, draw.choice([20, 50]))
    scores = want.scores[:, 1:]
    assert horizon * width < 4 or bool((scores[:, 1:] == scores[:, :-1]).any())


@pytest.mark.parametrize("seed", range(4))
def test_rows_out_of_order_and_non_finite_candidates(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(2, 5, 11, generator=generator)
    log_probs[0] = log_probs[0].sort(dim=-1, descending=True).values  # one request in order
    if seed:
        odd = torch.tensor([float("nan"), float("inf"), -float("inf")])
        broken = torch.rand(log_probs.shape, generator=generator) < 0.2
        pick = torch.randint(0, 3, log_probs.shape, generator=generator)
        log_probs = torch.where(broken, odd[pick], log_probs)
    if seed == 3:
        log_probs[1, 2] = float("nan")  # no depth beyond it
    tokens = torch.randperm(log_probs.numel(), generator=generator).view(log_probs.shape)
    compare(log_probs, tokens, 25)


def test_additions_round_as_the_reference_rounds() -> None:
    """Siblings come from one another, and their sums cross powers of two: straight sums differ."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -(torch.rand(1, 2, 20, generator=generator) * 0.1 + 1)
    log_probs[0, 0] *= 1e-9
    log_probs[0, 0, 3:] = -float("inf")
    log_probs[0, 1] *= 1.5 ** torch.arange(20)
    log_probs = log_probs.sort(dim=-1, descending=True).values
    tokens = torch.arange(log_probs.numel()).view(log_probs.shape)
    want = compare(log_probs, tokens, 63)
    value = dict(zip(tokens.flatten().tolist(), log_probs.double().flatten().tolist(), strict=True))
    straight = [0.0]  # the same paths, summed from the root on
    for token, parent in zip(
        want.tokens[0, 1:].tolist(), want.parents[0, 1:].tolist(), strict=True
    ):
        straight.append(straight[parent] + value[token])
    assert want.scores[0].tolist() != straight


@pytest.mark.parametrize("chain", [False, True])
def test_limits_and_rows(chain: bool) -> None:
    log_probs, tokens = build_cases.inputs(build_cases.Case(6, 5, 8, 15, 2.0))
    depth = torch.tensor([0, 1, 2, 5, 9, -1])
    nodes = torch.tensor([15, 3, 0, 99, 7, 4])
    want = compare(log_probs, tokens, 15, depth_limit=depth, node_limit=nodes, chain=chain)
    assert bool((want.depths.amax(1) <= depth.clamp(min=0)).all())
    assert bool((want.nodes <= nodes).all()) and int(want.nodes[1]) == (1 if chain else 3)
    compare(log_probs[1:3], tokens[1:3], 15, depth_limit=depth[1:3])
    compare(log_probs[1:3], tokens[1:3], 15, node_limit=nodes[1:3])

    places = TreePlaces(
        torch.arange(6) * 11, torch.tensor([0, 63, 64, 1000, 96, 97]).int(), torch.arange(6) * 64
    )
    plan = plan_trees(log_probs, tokens, 15, places, 100, depth, nodes, chain)
    assert_same(plan.trees, want)
    got = _launch_tree(log_probs, tokens, 15, depth, nodes, chain, places, 100)
    assert torch.equal(got[1], plan.ancestors)
    assert_same(got[2], plan.rows)
    assert plan.rows.tokens[:, 0].tolist() == (torch.arange(6) * 11).tolist()
    assert int(plan.rows.positions.max()) == 99 and plan.rows.slots[2].tolist()[:2] == [128, 129]
    assert int(plan.rows.tokens.min()) >= 0


@pytest.mark.parametrize("helpers", [1, 3])
def test_noise_comes_with_the_trees(helpers: int) -> None:
    """As bounds_kernel makes it, and where the temperature is 0 untouched; the trees unchanged."""
    case = build_cases.CASES["peaked"]._replace(budget=15)
    log_probs, tokens = build_cases.inputs(case)
    places = TreePlaces(
        torch.tensor([5, 6]), torch.tensor([60, 2**31 - 9]).int(), torch.tensor([0, 64])
    )
    seeds, depths, vocab = torch.tensor([3, -(2**60)]), 3, 1300
    for heat in ([0.7, 1.0], [1.0, 0.0]):
        wanted = NoiseWanted(seeds, torch.tensor(heat), depths, vocab)
        got = _launch_tree(
            log_probs, tokens, 15, None, None, False, places, 1 << 31, wanted, helpers
        )
        assert_same(got[0], tree_build(log_probs, tokens, 15))
        assert got[3] is not None and torch.equal(got[3].contexts, places.contexts)
        want = _launch_bounds(seeds, places.contexts, wanted.temperature, depths, vocab)
        hot = wanted.temperature > 0
        assert torch.equal(got[3].values[hot], want.values[hot])


@pytest.mark.parametrize("name", mask_cases.CASES)
def test_masks(name: str) -> None:
    parents = mask_cases.inputs(mask_cases.CASES[name])[:3]
    assert torch.equal(_launch_mask(parents), tree_mask(parents))


@pytest.mark.parametrize("name", accept_cases.CASES)
def test_walks(name: str) -> None:
    trees, picks = accept_cases.inputs(accept_cases.CASES[name])
    length = int(trees.depths.max()) + 1
    walk = (trees.tokens, trees.parents, picks, length)
    want = tree_accept(*walk)
    assert_same(_launch_accept(*walk), want)
    assert not bool(want.broken.any())
    generator = torch.Generator().manual_seed(1)
    finite = torch.rand(picks.shape, generator=generator) < 0.7
    finite[0, 0] = False
    assert_same(_launch_accept(*walk, finite), tree_accept(*walk, finite))
    # a path ends before its first row that is not finite
    broken = tree_accept(*walk, finite)
    for request, path in enumerate(want.indices.tolist()):
        path = [row for row in path if row >= 0]
        good = finite[request, path].tolist() + [False]
        first = good.index(False)
        assert int(broken.lengths[request]) == first
        assert bool(broken.broken[request]) == (first < len(path))
    assert int(broken.lengths[0]) == 0


def test_of_two_children_with_one_token_the_first_counts() -> None:
    tokens = torch.tensor([[-1, 5, 5, 7]])
    parents = torch.tensor([[-1, 0, 0, 2]])
    picks = torch.tensor([[5, 7, 7, 9]])
    assert _launch_accept(tokens, parents, picks, 3).indices.tolist() == [[0, 1, -1]]


@pytest.mark.parametrize("case", commit_cases.CASES[1:], ids=lambda case: case.name)
@pytest.mark.parametrize("shape", [(3, 64, 6), (3, 64, 2, 2, 80)])
def test_commit_rows(case: commit_cases.Case, shape: tuple[int, ...]) -> None:
    before = [torch.randn(shape) for _ in range(3)]
    want, got = ([layer.clone() for layer in before] for _ in range(2))
    source, destination = torch.tensor(case.source), torch.tensor(case.destination)
    commit_reference.commit_rows(want, source, destination)
    cache_commit._launch_rows(got, source, destination)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_commit_paths(dtype: torch.dtype) -> None:
    """Pages in any order, paths of every length, page borders, and rows beyond the table."""
    page, spill = 64, 11 * 64
    indices = torch.full((4, 5), -1)
    indices[0, :1], indices[1, :5] = torch.tensor([0]), torch.tensor([0, 1, 4, 6, 7])
    indices[2, :3] = torch.tensor([0, 2, 3])
    lengths = torch.tensor([1, 5, 3, 0])
    contexts = torch.tensor([0, 62, 126, 5], dtype=torch.int32)  # the third leaves its two pages
    pages = torch.tensor([[3, 0], [6, 2], [1, 5], [4, 4]], dtype=torch.int32)
    slots = torch.arange(7, 11)[:, None] * page + torch.arange(8)
    before = [torch.randn(12, page, 6, 7).to(dtype) for _ in range(3)]
    want, got = ([layer.clone() for layer in before] for _ in range(2))
    move = (slots, indices, lengths, contexts, pages)
    cache_commit.commit_paths_device(want, *move, spill)
    cache_commit._launch_paths(got, *move, columns=32)
    for old, one, other in zip(before, got, want, strict=True):
        assert torch.equal(one[:11], other[:11])
        assert torch.equal(one[6, 62:], old[8, [0, 1]])
        assert torch.equal(one[2, :3], old[8, [4, 6, 7]])
        assert torch.equal(one[5, 62:], old[9, [0, 2]])
        assert torch.equal(one[11], old[11])
        moved = (one != old).flatten(2).any(-1).sum()
        assert int(moved) == 1 + 5 + 2
