"""Trees against a brute-force enumerator, their masks, walks and value."""

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine.errors import OptionError
from kdtree_engine.kernels.tree_accept import cases as accept_cases
from kdtree_engine.kernels.tree_accept import tree_accept
from kdtree_engine.kernels.tree_build import cases as build_cases
from kdtree_engine.kernels.tree_build import tree_build
from kdtree_engine.kernels.tree_mask import cases as mask_cases
from kdtree_engine.kernels.tree_mask import tree_mask, tree_visibility
from kdtree_engine.tree import (
    DraftBlock,
    DraftTree,
    accept,
    ancestor_bits,
    build_tree,
    chain_tree,
    expected_by_budget,
    expected_tokens,
)

# Quarters add without rounding, so equal sums are equal whatever the order of the additions.
quarters = st.integers(0, 12).map(lambda quarter: -quarter / 4)
odd_values = st.sampled_from([float("nan"), float("inf"), -float("inf")])


@st.composite
def proposals(draw: st.DrawFn, broken: bool = False) -> list[list[float]]:
    horizon, width = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    values = quarters | odd_values if broken else quarters
    rows = st.lists(values, min_size=width, max_size=width)
    return [draw(rows) for _ in range(horizon)]


def enumerate_paths(rows: list[list[float]], budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """All paths of the full candidate tree as (score, ranks), best first, the first `budget`."""
    paths = [
        (-sum(rows[depth][rank] for depth, rank in enumerate(ranks)), ranks)
        for depth in range(1, len(rows) + 1)
        for ranks in itertools.product(*(range(len(row)) for row in rows[:depth]))
    ]
    return [(-negated, ranks) for negated, ranks in sorted(paths)[:budget]]


def to_tensors(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = len(rows[0]) if rows else 3
    log_probs = torch.tensor(rows, dtype=torch.float32).view(len(rows), width)
    tokens = torch.arange(len(rows) * width).view(len(rows), width) * 7 + 3
    return log_probs, tokens


def rank_paths(tree: DraftTree, tokens: torch.Tensor) -> list[tuple[int, ...]]:
    """The ranks along each row's path; the root's is empty."""
    paths: list[tuple[int, ...]] = [()]
    for row in range(1, tree.nodes + 1):
        parent, depth = int(tree.parents[row]), int(tree.depths[row])
        assert parent < row and int(tree.depths[parent]) == depth - 1
        names = tokens[depth - 1].tolist()
        paths.append((*paths[parent], names.index(int(tree.tokens[row]))))
    return paths


@settings(deadline=None)
@given(rows=proposals(), budget=st.integers(0, 40))
def test_equals_brute_force_ties_included(rows: list[list[float]], budget: int) -> None:
    rows = [sorted(row, reverse=True) for row in rows]
    log_probs, tokens = to_tensors(rows)
    tree = build_tree(log_probs, tokens, budget)
    wanted = enumerate_paths(rows, budget)
    assert tree.scores[1:].tolist() == [score for score, _ in wanted]
    assert rank_paths(tree, tokens)[1:] == [ranks for _, ranks in wanted]


@settings(deadline=None)
@given(rows=proposals(broken=True), budget=st.integers(0, 40))
def test_drops_what_is_not_finite_and_sorts(rows: list[list[float]], budget: int) -> None:
    log_probs, tokens = to_tensors(rows)
    tree = build_tree(log_probs, tokens, budget)
    # the same candidates, cleaned and sorted here
    order = [
        sorted((i for i, value in enumerate(row) if abs(value) < 100), key=lambda i: -row[i])
        for row in rows
    ]
    clean = [[row[i] for i in kept] for row, kept in zip(rows, order, strict=True)]
    wanted = enumerate_paths(clean, budget)
    assert tree.scores[1:].tolist() == [score for score, _ in wanted]
    got = [
        tuple(order[depth].index(i) for depth, i in enumerate(ranks))
        for ranks in rank_paths(tree, tokens)[1:]
    ]
    assert got == [ranks for _, ranks in wanted]


@settings(deadline=None)
@given(rows=proposals(), budget=st.integers(0, 39))
def test_a_smaller_tree_is_a_prefix(rows: list[list[float]], budget: int) -> None:
    small, large = (build_tree(*to_tensors(rows), count) for count in (budget, budget + 1))
    for name in ("tokens", "parents", "depths", "scores"):
        part = getattr(large, name)[: small.nodes + 1]
        assert torch.equal(part, getattr(small, name))
    values = expected_by_budget(large)
    assert expected_tokens(small) == float(values[small.nodes])
    assert expected_tokens(small) >= 1.0


def test_a_certain_child_follows_its_parent() -> None:
    """A log-probability of exactly 0 ties child and parent; the parent is made first."""
    tree = build_tree(torch.zeros(3, 2), torch.tensor([[1, 2]] * 3), 5)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 2, 1]
    assert tree.tokens.tolist() == [-1, 1, 1, 1, 2, 2]
    assert expected_tokens(tree) == 6.0


@pytest.mark.parametrize("name", build_cases.CASES)
def test_operator_pads_and_batches(name: str) -> None:
    case = build_cases.CASES[name]
    log_probs, tokens = build_cases.inputs(case)
    built = tree_build(log_probs, tokens, case.budget)
    for request in range(case.requests):
        tree = build_tree(log_probs[request], tokens[request], case.budget)
        assert int(built.nodes[request]) == tree.nodes <= case.budget
        cut = tree.nodes + 1
        assert torch.equal(built.tokens[request, :cut], tree.tokens)
        assert torch.equal(built.scores[request, :cut], tree.scores)
        assert (built.parents[request, cut:] == -1).all()
        assert (built.tokens[request, cut:] == -1).all()
        assert (built.scores[request, cut:] == -torch.inf).all()


def test_refusals() -> None:
    with pytest.raises(OptionError, match="cannot have -1 nodes"):
        build_tree(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64), -1)
    with pytest.raises(OptionError, match=r"\[2, 3\] and tokens \[3, 2\]"):
        build_tree(torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.int64), 1)
    with pytest.raises(OptionError, match="must both be"):
        build_tree(torch.zeros(2), torch.zeros(2, dtype=torch.int64), 1)


def test_chain() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [float("nan"), -3.0], [-0.5, -0.5], [-torch.inf] * 2])
    block = DraftBlock(torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), log_probs)
    assert block.horizon == 4
    chain = chain_tree(block, 10)
    assert chain.tokens.tolist() == [-1, 1, 4, 5], "the last depth has no finite candidate"
    assert chain.parents.tolist() == [-1, 0, 1, 2]
    assert chain.scores.tolist() == [0.0, -1.0, -4.0, -4.5]
    assert chain_tree(block, 2).nodes == 2
    assert chain_tree(block, 0).nodes == 0
    empty = DraftBlock(torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, 5))
    assert chain_tree(empty, 3).nodes == 0
    with pytest.raises(OptionError):
        chain_tree(block, -1)


def slow_ancestors(parents: list[int], row: int) -> set[int]:
    found = set()
    while row >= 0:
        found.add(row)
        row = parents[row]
    return found


@pytest.mark.parametrize("name", mask_cases.CASES)
def test_masks(name: str) -> None:
    parents = mask_cases.inputs(mask_cases.CASES[name])
    bits, seen = tree_mask(parents), tree_visibility(parents)
    for request, links in enumerate(parents.tolist()):
        for row in range(len(links)):
            wanted = slow_ancestors(links, row)
            word = int(bits[request, row]) % 2**64
            assert {j for j in range(64) if word >> j & 1} == wanted
            assert set(seen[request, row].nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("budget", [0, 1, 7, 62, 63])
def test_tree_masks_are_the_paths(budget: int) -> None:
    log_probs, tokens = build_cases.inputs(build_cases.CASES["word"])
    tree = build_tree(log_probs[0], tokens[0], budget)
    pair = [tree, build_tree(log_probs[0], tokens[0], 3)]
    batch = ancestor_bits(pair, 64)
    for row in range(budget + 1):
        word = int(batch[0, row]) % 2**64
        assert {j for j in range(64) if word >> j & 1} == slow_ancestors(tree.parents.tolist(), row)
    assert torch.equal(batch[0, : budget + 1], ancestor_bits([tree], budget + 1)[0])
    assert batch[1, 63] == -(2**63), "a padding row sees itself"


def test_a_large_tree_has_a_matrix_but_no_words() -> None:
    log_probs, tokens = build_cases.inputs(build_cases.CASES["over a word"])
    tree = build_tree(log_probs[0], tokens[0], 300)
    assert tree.nodes == 300
    seen = tree_visibility(tree.parents[None])[0]
    for row in (0, 1, 64, 299, 300):
        wanted = slow_ancestors(tree.parents.tolist(), row)
        assert set(seen[row].nonzero().flatten().tolist()) == wanted
    with pytest.raises(AssertionError):
        ancestor_bits([tree], tree.nodes + 1)


@pytest.mark.parametrize("name", accept_cases.CASES)
def test_walks(name: str) -> None:
    trees, picks = accept_cases.inputs(accept_cases.CASES[name])
    length = int(trees.depths.max()) + 1
    got = tree_accept(trees.tokens, trees.parents, picks, length)
    for request, count in enumerate(trees.nodes.tolist()):
        row, path = 0, [0]
        while True:  # look through all rows for the child
            pick = int(picks[request, row])
            matches = [
                child
                for child in range(1, count + 1)
                if trees.parents[request, child] == row and trees.tokens[request, child] == pick
            ]
            if not matches:
                break
            row = matches[0]
            path.append(row)
        assert got.indices[request].tolist() == path + [-1] * (length - len(path))
        assert int(got.lengths[request]) == len(path)
        assert int(got.next_tokens[request]) == int(picks[request, row])
        assert path == sorted(set(path)), "indices rise"


def test_same_token_under_two_parents() -> None:
    tree = DraftTree(
        tokens=torch.tensor([-1, 5, 6, 9, 9]),
        parents=torch.tensor([-1, 0, 0, 1, 2]),
        depths=torch.tensor([0, 1, 1, 2, 2]),
        scores=torch.zeros(5, dtype=torch.float64),
    )
    path = accept(tree, torch.tensor([6, 0, 9, 0, 42]))
    assert (list(path.indices), path.next_token) == ([0, 2, 4], 42)
    assert list(accept(tree, torch.tensor([9, 9, 9, 9, 9])).indices) == [0]


def test_the_largest_tree_is_cheap() -> None:
    """63 nodes from 7 depths: aim 0.5 ms; the bound here only catches a change of order."""
    log_probs, tokens = build_cases.inputs(build_cases.CASES["word"])
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        build_tree(log_probs[0], tokens[0], 63)
        best = min(best, time.perf_counter() - start)
    assert best < 2e-3
