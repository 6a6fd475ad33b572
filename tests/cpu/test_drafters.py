"""Drafters without a model: shapes, what they find, determinism, planted truth."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.drafter.base import DraftState, HostDrafter, empty_block, stack_blocks
from kdtree_engine.drafter.ngram import NgramDrafter
from kdtree_engine.drafter.none import NoDrafter
from kdtree_engine.drafter.random import RandomDrafter
from kdtree_engine.drafter.replay import ReplayDrafter
from kdtree_engine.engine.policy import TreePolicy
from kdtree_engine.kernels.tree_build import tree_build
from kdtree_engine.tree import build_tree
from kdtree_engine.types import DraftBlock

VOCAB = 50
ANSWER = [(7 * i * i + 3 * i) % VOCAB for i in range(400)]


def state(tokens: list[int], request: int = 0) -> DraftState:
    return DraftState(request, tokens)


def propose(drafter: HostDrafter, tokens: list[int], candidates: int = 15) -> DraftBlock:
    [block] = drafter.propose([state(tokens)], candidates)
    return block


def check_block(block: DraftBlock, drafter: HostDrafter, candidates: int) -> None:
    """What every consumer relies on."""
    depths, width = block.tokens.shape
    assert block.log_probs.shape == (depths, width)
    assert block.tokens.dtype == torch.int64 and block.log_probs.dtype == torch.float32
    assert depths <= drafter.horizon and width <= candidates
    assert not bool(block.log_probs.isnan().any())
    for ids, scores in zip(block.tokens, block.log_probs, strict=True):
        assert bool((scores[1:] <= scores[:-1]).all()), "likeliest first"
        live = ids[scores.isfinite()].tolist()
        assert live and len(set(live)) == len(live), "candidates of a depth are distinct"
        assert all(0 <= token < VOCAB for token in live)
        assert float(scores.exp().sum()) <= 1.0 + 1e-3


@pytest.mark.parametrize("candidates", [1, 2, 15, 63])
@pytest.mark.parametrize("length", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("name", ["none", "ngram", "random", "replay"])
def test_blocks_are_well_formed(name: str, length: int, candidates: int) -> None:
    drafter: HostDrafter = {
        "none": NoDrafter(),
        "ngram": NgramDrafter(),
        "random": RandomDrafter(VOCAB),
        "replay": ReplayDrafter([ANSWER], VOCAB),
    }[name]
    for tokens in (ANSWER[:length], [3] * length):
        check_block(propose(drafter, tokens, candidates), drafter, candidates)
    several = [state(ANSWER[: length + extra], extra) for extra in range(3)]
    blocks = drafter.propose(several, candidates)
    for one, block in zip(several, blocks, strict=True):  # requests do not see one another
        alone = propose(drafter, list(one.tokens), candidates)
        assert torch.equal(block.tokens, alone.tokens)
        assert torch.equal(block.log_probs, alone.log_probs)


def test_none_proposes_nothing() -> None:
    assert propose(NoDrafter(), ANSWER).horizon == 0


# ------------------------------------------------------------------------------------ n-gram


def best(block: DraftBlock) -> list[int]:
    return [] if block.horizon == 0 else block.tokens[:, 0].tolist()


def test_ngram_continues_a_repeat() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert best(propose(NgramDrafter(horizon=5), [*text, 40, 2, 3])) == [4, 5, 6, 7, 8]


def test_ngram_ends_where_the_text_ends() -> None:
    assert best(propose(NgramDrafter(), [1, 2, 3, 9, 1, 2])) == [3, 9, 1, 2]


def test_ngram_is_silent_without_a_repeat() -> None:
    assert propose(NgramDrafter(), list(range(40))).horizon == 0
    assert propose(NgramDrafter(), [7]).horizon == 0


def test_ngram_trusts_the_longest_match() -> None:
    """[2 3] was followed by 4 once; 3 alone was followed by 8 three times."""
    assert best(propose(NgramDrafter(), [2, 3, 4, 1, 3, 8, 5, 3, 8, 6, 3, 8, 2, 3]))[0] == 4


def test_ngram_votes_branch_and_recent_ones_weigh_more() -> None:
    block = propose(NgramDrafter(longest=1), [5, 1, 9, 5, 2, 9, 5, 3, 9, 5])
    assert block.tokens[0, :3].tolist() == [3, 2, 1]
    assert block.tokens[1, 0].item() == 9
    tree = build_tree(block.log_probs, block.tokens, 8)
    assert (tree.depths[1:] == 1).sum() > 1, "a tree, not a chain"


def test_ngram_sees_the_output_as_well() -> None:
    """A drafter that looked at the prompt alone would miss a loop in the output."""
    tokens = [30, 31, 32] * 5
    assert best(propose(NgramDrafter(horizon=4), tokens)) == [30, 31, 32, 30]


# -------------------------------------------------------------------------- random and replay


def test_random_is_a_function_of_seed_and_text() -> None:
    one, same = propose(RandomDrafter(VOCAB), ANSWER[:9]), propose(RandomDrafter(VOCAB), ANSWER[:9])
    assert torch.equal(one.tokens, same.tokens) and torch.equal(one.log_probs, same.log_probs)
    others = (
        propose(RandomDrafter(VOCAB, seed=1), ANSWER[:9]),
        propose(RandomDrafter(VOCAB), ANSWER[:10]),
        propose(RandomDrafter(VOCAB), [*ANSWER[:8], 49 - ANSWER[8]]),
    )
    assert all(not torch.equal(one.tokens, other.tokens) for other in others)


def test_random_is_peaked_in_some_depths_and_flat_in_others() -> None:
    tops = torch.cat(
        [propose(RandomDrafter(VOCAB), ANSWER[:n]).log_probs[:, 0] for n in range(1, 60)]
    )
    assert float(tops.max()) > -0.1 and float(tops.min()) < -2.5


def test_replay_plants_the_truth_at_every_depth_and_rank() -> None:
    """Over some hundreds of proposals each (depth, rank up to 8) holds the truth."""
    drafter = ReplayDrafter([[9, 9], ANSWER], VOCAB)
    seen = set()
    for length in range(1, len(ANSWER) - 7):
        block = propose(drafter, ANSWER[:length])
        for depth in range(7):
            ids = block.tokens[depth].tolist()
            assert ids.count(ANSWER[length + depth]) == 1
            seen.add((depth, ids.index(ANSWER[length + depth])))
    assert seen == {(depth, rank) for depth in range(7) for rank in range(9)}


def test_replay_is_silent_off_the_known_answer() -> None:
    drafter = ReplayDrafter([ANSWER], VOCAB)
    assert propose(drafter, [*ANSWER[:5], (ANSWER[5] + 1) % VOCAB]).horizon == 0
    assert propose(drafter, ANSWER).horizon == 0
    assert propose(drafter, ANSWER[:-3]).horizon == 3


# ------------------------------------------------------------------------------------- policy


@pytest.mark.parametrize("nodes", [0, 1, 2, 7, 15, 63])
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
def test_horizon_and_budget_are_separate(nodes: int, chain: bool) -> None:
    """Pain points 17 and 19: any budget works with any horizon, block size 2 included, and a
    larger budget never makes the drafter look further.
    """
    for horizon in (1, 3, 7):
        block = propose(
            RandomDrafter(VOCAB, horizon=horizon), ANSWER[:20], candidates=max(nodes, 1)
        )
        assert block.horizon == horizon
        for most in (0, 2, 50):
            limit, reach = torch.tensor([most]), min(horizon, most)
            blocks = stack_blocks([block])
            tree = tree_build(
                blocks.log_probs, blocks.tokens, nodes, depth_limit=limit, chain=chain
            )
            count = int(tree.nodes)
            assert count == TreePolicy(nodes, chain).size([block.tokens.shape[1]] * reach)
            assert count <= nodes and int(tree.depths.max()) <= reach
            if chain:
                assert count == min(nodes, reach)
                assert tree.parents[0, : count + 1].tolist() == list(range(-1, count))
            elif reach:
                assert count == min(nodes, sum(min(nodes, VOCAB) ** d for d in range(1, reach + 1)))


def test_a_tree_s_size_is_known_from_the_candidates() -> None:
    """The rows of a step are chosen before its trees are built: exactly as many as they need."""
    draw = torch.Generator().manual_seed(5)
    for _ in range(200):
        depths, width, nodes = (int(torch.randint(1, 6, (), generator=draw)) for _ in range(3))
        log_probs = -torch.rand(depths, width, generator=draw).cumsum(1)
        log_probs[torch.rand(depths, width, generator=draw) < 0.4] = -torch.inf
        tokens = torch.arange(width).expand(depths, width)
        for chain in (False, True):
            built = tree_build(log_probs[None], tokens[None], 7 * nodes, chain=chain)
            usable = log_probs.isfinite().sum(1).tolist()
            assert TreePolicy(7 * nodes, chain).size(usable) == int(built.nodes)


def test_blocks_of_several_requests_are_padded() -> None:
    """With candidates that no tree takes."""
    blocks = [empty_block(), propose(RandomDrafter(VOCAB, horizon=3), ANSWER[:9], 4)]
    for stacked in (stack_blocks(blocks), stack_blocks(blocks, 4, 5, 6)):
        assert stacked.tokens.shape == stacked.log_probs.shape
        assert torch.equal(stacked.tokens[1, :3, :4], blocks[1].tokens)
        assert torch.equal(stacked.log_probs[1, :3, :4], blocks[1].log_probs)
        assert int(stacked.log_probs.isfinite().sum()) == 12
    assert stacked.tokens.shape == (4, 5, 6)


def test_siblings_share_a_position() -> None:
    """Pain point 8: a node's depth is its parent's plus one, so siblings share a position."""
    block = propose(RandomDrafter(VOCAB), ANSWER[:20], candidates=63)
    tree = build_tree(block.log_probs, block.tokens, 63)
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    assert len(set(parents)) < tree.nodes, "there are siblings"
    assert all(depths[row] == depths[parents[row]] + 1 for row in range(1, tree.nodes + 1))
