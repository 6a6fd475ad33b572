"""Speculation never shows in the text, and its state never leaks: public failures replayed.

Numbers are those of the list in docs/log.md. Others of that list are where their matter is: 1, 2, 4
and 18 in test_dflash.py, 16 in test_engine_requests.py, 17 and 19 also in cpu/test_drafters.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import CheckpointMaker
from torch import Tensor

from e2e.helpers import greedy, load, plain, prompt, replay, run, run_traced, sampled
from kdtree_engine import LLM
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.drafter.base import DraftStates
from kdtree_engine.drafter.replay import ReplayDrafter
from kdtree_engine.engine import loop
from kdtree_engine.types import DraftBlocks, SpanTable, StepInputs, TargetOutput

DRAFTERS = ("ngram", "random", "dflash")


@pytest.fixture
def folder(checkpoint: CheckpointMaker) -> Path:
    return checkpoint("k2.6", drafter=True)


def load_with(folder: Path, drafter: str, **options: Any) -> LLM:
    return load(folder, folder / "drafter" if drafter == "dflash" else drafter, **options)


# --------------------------------------------------------------------- nothing is left behind


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_second_request_sees_nothing_of_the_first(drafter: str, folder: Path) -> None:
    """Pain point 5: draft state that is not reset. Same text, and the same trees, as on a fresh
    engine: after a longer request, after one that used every page, and after a cancelled one.
    """
    ids = prompt(90, seed=1)
    fresh, trees = run_traced(load_with(folder, drafter), ids, greedy(40))
    assert fresh.token_ids == plain(folder, ids, greedy(40))
    used = load_with(folder, drafter, cache_pages=5, max_requests=1)
    run(used, prompt(200, seed=3), greedy(50))
    stream = used.stream(prompt(150, seed=5), greedy(50))
    next(stream)
    stream.close()
    for _ in range(2):
        again, same_trees = run_traced(used, ids, greedy(40))
        assert again.token_ids == fresh.token_ids
        assert again.stats.accepted == fresh.stats.accepted
        assert same_trees == trees


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prefix_hit_keeps_acceptance(drafter: str, folder: Path) -> None:
    """Pain point 6: after a prefix hit the draft is null, or everything is computed anew. Here the
    drafter's keys come with the pages: the very same trees.
    """
    ids = prompt(150, seed=1)
    llm = load_with(folder, drafter)
    (cold, cold_trees), (warm, warm_trees) = (run_traced(llm, ids, greedy(40)) for _ in range(2))
    assert cold.stats.cached_tokens == 0
    assert warm.stats.cached_tokens == 128
    assert warm.token_ids == cold.token_ids == plain(folder, ids, greedy(40))
    assert warm.stats.accepted == cold.stats.accepted
    assert warm_trees == cold_trees
    # What was generated is found as well: a follow-up turn starts behind it.
    follow = [*ids, *cold.token_ids, *prompt(10, seed=7)]
    for text, cached in ((follow, 128), ([*follow, 5], 192)):
        later, trees = run_traced(llm, text, greedy(20))
        assert (len(text), later.stats.cached_tokens) == (200 + (cached > 128), cached)
        fresh, fresh_trees = run_traced(load_with(folder, drafter), text, greedy(20))
        assert (later.token_ids, trees) == (fresh.token_ids, fresh_trees)


def test_lost_draft_keys_would_show(folder: Path) -> None:
    """The comparison above can fail: without the draft keys of shared pages the trees differ, and
    the text still does not.
    """
    ids = prompt(150, seed=1)
    llm = load_with(folder, "dflash")
    cold, cold_trees = run_traced(llm, ids, greedy(40))
    for layer in llm.engine.pool.draft:
        layer.zero_()
    warm, warm_trees = run_traced(llm, ids, greedy(40))
    assert warm.stats.cached_tokens == 128
    assert warm_trees != cold_trees
    assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize("length", [64, 65, 128, 129])
def test_a_prefix_hit_leaves_at_least_one_token_to_compute(length: int, folder: Path) -> None:
    llm, ids = load(folder), prompt(length)
    outs = [run(llm, ids, greedy(5)) for _ in range(2)]
    assert outs[1].stats.cached_tokens == (length - 1) // 64 * 64
    assert outs[0].token_ids == outs[1].token_ids == plain(folder, ids, greedy(5))


# ------------------------------------------------------------------- positions and the cache


def watch_forward(llm: LLM) -> list[StepInputs]:
    """Notes every step's inputs."""
    seen: list[StepInputs] = []
    target = llm.engine.target

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def forward(self, inputs: StepInputs, *rest: Any) -> TargetOutput:
            seen.append(inputs)
            return target.forward(inputs, *rest)

    llm.engine.target = Watched()  # type: ignore[assignment]
    return seen


def test_siblings_share_a_position(folder: Path) -> None:
    """Pain point 8: positions of tree rows fall back to sequential, which inflates acceptance."""
    ids = prompt(70)
    llm = load(folder, replay(folder, ids, ranks=8), tree_nodes=31)
    seen = watch_forward(llm)
    run(llm, ids, greedy(40))
    siblings = 0
    for inputs in seen:
        assert isinstance(inputs.spans, SpanTable)
        [context], masks = inputs.spans.contexts.tolist(), inputs.spans.ancestors
        positions = inputs.positions
        if masks is None:
            assert positions.tolist() == list(range(context, context + len(positions)))
            continue
        ancestors = [bin(mask & (2**64 - 1)).count("1") for mask in masks[0].tolist()]
        assert (positions - context + 1).tolist() == ancestors
        siblings += len(positions) - len(set(ancestors))
    assert siblings > 20


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_cache_is_dense_after_branching_paths(ranks: int, folder: Path) -> None:
    """Pain point 9: accepted rows stay scattered and the next step reads garbage. After many
    branching steps every layer holds, at every position, the bits that plain decoding puts there.
    """
    ids, tokens = prompt(61), 60
    kept = []
    for drafter in ("none", replay(folder, ids, tokens, ranks=ranks)):
        llm = load(folder, drafter, tree_nodes=63)
        request = llm.engine.add(ids, greedy(tokens))
        pages: list[int] = []
        while request.finish_reason is None:
            llm.engine.step()
            pages = list(request.pages) or pages
        llm.engine.check_integrity()
        rows = [
            latents[pages].flatten(0, 1)[: request.context] for latents in llm.engine.pool.latents
        ]
        kept.append(torch.stack(rows))
    assert max(request.stats.accepted) > 2
    assert kept[0].shape[1] == len(ids) + tokens - 1
    assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("drafter", [*DRAFTERS, "replay"])
@pytest.mark.parametrize("settings", [greedy(30), sampled(30)], ids=["greedy", "sampled"])
def test_batched_trees_equal_stepwise_decoding(drafter: str, settings: Any, folder: Path) -> None:
    """Pain point 12: no divergence at any token, nearly flat logits included."""
    texts = [prompt(length, seed=length) for length in (5, 63, 64, 130)]
    truth = [plain(folder, ids, settings) for ids in texts]
    if drafter == "replay":
        answers = [ids + answer for ids, answer in zip(texts, truth, strict=True)]
        llm = load(folder, ReplayDrafter(answers, 160))
    else:
        llm = load_with(folder, drafter)
    outs = llm.generate(texts, settings)
    llm.engine.check_integrity()
    assert [out.token_ids for out in outs] == truth


# ------------------------------------------------------------------------ budgets and horizons


@pytest.mark.parametrize("nodes", [0, 1, 2, 63, "chain:0", "chain:1", "chain:2", "chain:63"])
@pytest.mark.parametrize("block", [2, 3, 8])
def test_any_budget_with_any_block(
    nodes: int | str, block: int, checkpoint: CheckpointMaker
) -> None:
    """Pain point 17: budgets 0, 1, 2 and blocks of 2 fail. And the budget is never exceeded."""
    folder = checkpoint("k2.6", drafter=True, dims=Dims(block_size=block))
    ids = prompt(70, seed=1)
    out = run(load_with(folder, "dflash", tree_nodes=nodes), ids, greedy(20))
    assert out.token_ids == plain(folder, ids, greedy(20))
    most = int(str(nodes).removeprefix("chain:"))
    if str(nodes).startswith("chain"):
        most = min(most, block - 1)
    assert max(out.stats.nodes) == most
    assert len(out.stats.nodes) == len(out.stats.accepted) == out.stats.steps
    assert max(out.stats.accepted) <= min(most, block - 1)


def test_the_budget_does_not_widen_the_block(folder: Path) -> None:
    """Pain point 19: a larger budget must not change what is drafted, only how much of it."""
    drafts: list[list[DraftBlocks]] = []
    for nodes in (1, 4, 63):
        llm = load_with(folder, "dflash", tree_nodes=nodes)
        made: list[DraftBlocks] = []
        propose = llm.engine.drafter.propose

        def noted(
            states: DraftStates, candidates: int, propose: Any = propose, made: Any = made
        ) -> DraftBlocks:
            made.append(propose(states, candidates))
            return made[-1]  # type: ignore[no-any-return]

        llm.engine.drafter.propose = noted  # type: ignore[method-assign]
        run(llm, prompt(70), greedy(3))
        drafts.append(made)
    first = [made[0] for made in drafts]
    assert [block.horizon for block in first] == [7, 7, 7]
    for block in first[:2]:
        width = block.tokens.shape[2]
        assert torch.equal(block.tokens, first[2].tokens[:, :, :width])
        assert torch.equal(block.log_probs, first[2].log_probs[:, :, :width])


# -------------------------------------------------------------------- lengths and the warning


@pytest.mark.parametrize("length", [*range(1, 9), *range(60, 69), *range(125, 133), 191, 192, 193])
def test_no_prompt_length_is_special(length: int, folder: Path) -> None:
    """Pain point 20: lengths at tile or page borders end after a token or two."""
    ids = prompt(length, seed=1)
    truth = plain(folder, ids, greedy(12))
    assert len(truth) == 12
    for drafter in ("ngram", "dflash"):
        out = run(load_with(folder, drafter, prefill_chunk=50), ids, greedy(12))
        assert (out.token_ids, out.finish_reason) == (truth, "length")


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Warnings of the engine's loop, whatever logging is set up."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    handler = Keep(logging.WARNING)
    loop.log.addHandler(handler)
    yield lines
    loop.log.removeHandler(handler)


def test_low_acceptance_of_a_trained_drafter_warns_once(folder: Path, warnings: list[str]) -> None:
    """Pain point 20, second half: an acceptance near 1 with correct text is an alarm."""
    llm = load_with(folder, "dflash")
    run(llm, prompt(70), greedy(60))
    assert warnings == [], "too early to tell"
    run(llm, prompt(80), greedy(60))
    assert len(warnings) == 1
    assert "tokens a step over 64 steps" in warnings[0]
    run(llm, prompt(90), greedy(150))
    assert len(warnings) == 1, "once is enough"


def test_no_warning_where_there_is_nothing_wrong(folder: Path, warnings: list[str]) -> None:
    ids = prompt(70)
    for drafter in ("ngram", "random"):  # nobody trained these
        run(load_with(folder, drafter), ids, greedy(150))
    good = replay(folder, ids, 200, ranks=1)
    good.trained = True
    out = run(load(folder, good), ids, greedy(200))
    run(load_with(folder, "dflash", tree_nodes=0), ids, greedy(150))
    assert out.stats.tokens_per_step > 2
    short = load(folder, replay(folder, ids, 200, ranks=1))
    short.engine.drafter.trained = True
    for _ in range(70):  # the one step has no room for a draft, which is nobody's fault
        run(short, ids, greedy(2))
    assert warnings == []


def test_statistics_add_up(folder: Path) -> None:
    """steps excludes prefill; tokens = the prefill's one, then 1 + accepted a step."""
    ids = prompt(70)
    out = run(load(folder, replay(folder, ids), prefill_chunk=16), ids, greedy(41))
    stats = out.stats
    emitted = 1 + sum(1 + accepted for accepted in stats.accepted)
    assert stats.tokens == 41 == len(out.token_ids)
    assert stats.steps == len(stats.accepted) == len(stats.nodes)
    assert emitted == 41  # what was cut off is not counted
    assert stats.tokens_per_step == pytest.approx(1 + sum(stats.accepted) / stats.steps)
    assert all(
        accepted <= nodes for accepted, nodes in zip(stats.accepted, stats.nodes, strict=True)
    )
    assert {"draft", "forward", "sample", "commit"} <= stats.seconds.keys()
    assert stats.to_dict()["accepted"] == stats.accepted


def test_null_page_check_can_fail(folder: Path) -> None:
    llm = load(folder)
    latents: Tensor = llm.engine.pool.latents[1]
    latents.view(-1, latents.shape[-1])[llm.engine.pool.layout.null_slot + 3] = 1.0
    with pytest.raises(AssertionError, match="null page"):
        llm.engine.check_integrity()
