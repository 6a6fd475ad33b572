"""The enumerated tree: against hand-made cases, the published builder's output and itself."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from shared_data import needs, shared_data

from . import tree

PUBLISHED = shared_data("ddtree_golden.npz")


def falling(rng: np.random.Generator, depths: int, width: int) -> np.ndarray:
    return -np.sort(rng.exponential(1.0, size=(depths, width)).astype(np.float32), axis=1)


def test_a_tree_by_hand() -> None:
    log_probs = np.log(np.array([[0.6, 0.3], [0.5, 0.4]], dtype=np.float32))
    tokens = np.array([[10, 11], [20, 21]])
    # 0.6, then 0.3 = 0.6 * 0.5 (a near tie), 0.24, 0.15, 0.12
    got = tree.build(log_probs, tokens, 6)
    assert set(got.ranks[2:4]) == {(1,), (0, 0)}
    assert got.ranks[4:] == [(0, 1), (1, 0), (1, 1)]
    assert got.tokens[[0, 1, 4]].tolist() == [-1, 10, 21]
    assert got.parents[0] == -1
    assert got.parents[4] == 1
    assert tree.expected_tokens(got.scores) == pytest.approx(1 + 0.9 + 0.9 * 0.9, abs=1e-6)
    assert tree.positions(got.depths, 100).tolist()[:2] == [100, 101]
    assert tree.build(log_probs, tokens, 0).tokens.tolist() == [-1]
    assert len(tree.build(log_probs, tokens, 99).tokens) == 7


def test_equal_scores_go_by_ranks_and_parents_come_first() -> None:
    certain = np.zeros((3, 2), dtype=np.float32)
    got = tree.build(certain, np.array([[1, 2]] * 3), 5)
    assert got.ranks == [(), (0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1)]


def test_scores_are_added_in_the_published_order() -> None:
    spine = [-3.1153416784945875e-05, -1.1300920199630582e-09, -18.975730895996094]
    last = [-1.3925555819582769e-08, -2.5605517706139835e-08, -0.005375999491661787, -2.9165787696]
    log_probs = np.array([[x] + [-np.inf] * 3 for x in spine] + [last], dtype=np.float32)
    got = tree.build(log_probs, np.arange(16).reshape(4, 4), 9)
    *above, row = ([x for x in r if np.isfinite(x)] for r in log_probs.tolist())
    parent = above[0][0] + above[1][0] + above[2][0]  # not sum(): it compensates since 3.12
    published = by_difference = parent + row[0]
    expected = [published]
    others: list[list[float]] = [[published], [published]]
    for own, following in itertools.pairwise(row):
        published = published - own + following
        by_difference = by_difference + (following - own)
        expected.append(published)
        others[0].append(parent + following)
        others[1].append(by_difference)
    assert got.scores[4:].tolist() == expected
    assert expected not in others  # so the case tells the three orders apart


def test_candidates_that_are_not_finite_are_dropped() -> None:
    log_probs = np.array([[-0.5, -np.inf], [-0.1, -0.2], [np.nan, -np.inf], [-0.1, -0.1]])
    got = tree.build(log_probs, np.arange(8).reshape(4, 2), 50)
    assert got.tokens[1:].tolist() == [0, 2, 3]


@pytest.mark.parametrize("seed", range(4))
def test_pruning_leaves_out_nothing_and_the_sum_is_the_best_possible(seed: int) -> None:
    rng = np.random.default_rng(seed)
    log_probs, budget = falling(rng, 4, 5), 17
    got = tree.build(log_probs, np.arange(20).reshape(4, 5), budget)
    every = [ranks for depth in range(1, 5) for ranks in itertools.product(range(5), repeat=depth)]
    exact = sorted(
        every, key=lambda r: (-math.fsum(float(log_probs[d, k]) for d, k in enumerate(r)), r)
    )
    assert got.ranks[1:] == exact[:budget]
    assert (got.parents[1:] < np.arange(1, budget + 1)).all()


def test_visibility_is_ancestors_and_self() -> None:
    seen = tree.visibility(np.array([-1, 0, 0, 1, 3]))
    assert [row.nonzero()[0].tolist() for row in seen] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 1, 3],
        [0, 1, 3, 4],
    ]


def test_walk() -> None:
    tokens, parents = np.array([-1, 7, 8, 7, 9]), np.array([-1, 0, 0, 2, 3])
    assert tree.walk(tokens, parents, np.array([8, 0, 7, 9, 5])) == ([0, 2, 3, 4], 5)
    assert tree.walk(tokens, parents, np.array([7, 7, 7, 9, 5])) == ([0, 1], 7)
    assert tree.walk(tokens, parents, np.array([9, 7, 7, 9, 5])) == ([0], 9)


@needs(PUBLISHED)
def test_published_trees_and_walks() -> None:
    data = np.load(PUBLISHED, allow_pickle=False)
    cases = json.loads(str(data["meta"]))["cases"]
    checked = 0
    for i, case in enumerate(cases):
        name = f"c{i:03d}_"
        parents = data[f"{name}parents"]
        size = len(parents)
        bits = np.unpackbits(data[f"{name}visibility"], axis=1, count=size)
        np.testing.assert_array_equal(tree.visibility(parents), bits.astype(bool))
        tokens = np.concatenate([[-1], data[f"{name}tokens"]])
        for w, picks in enumerate(data[f"{name}posterior"]):
            length = data[f"{name}accepted_len"][w]
            expected = data[f"{name}accepted"][w][:length].tolist()
            assert tree.walk(tokens, parents, picks) == (expected, data[f"{name}next_token"][w])
        if case["budget"] > 100:
            continue
        top = data[f"{name}top_logprobs"], data[f"{name}top_tokens"]
        got = tree.build(*top, case["budget"])
        np.testing.assert_array_equal(got.tokens, tokens)
        np.testing.assert_array_equal(got.parents, parents)
        np.testing.assert_array_equal(got.depths[1:], data[f"{name}depths"])
        np.testing.assert_array_equal(got.scores[1:], data[f"{name}scores"])  # to the bit
        assert [r[-1] for r in got.ranks[1:]] == data[f"{name}ranks"].tolist()
        checked += 1
    assert checked >= 50
