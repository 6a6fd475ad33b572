"""One decode step: draft, build, forward, sample, walk, commit. Plain decoding is the tree with
only a root: there is no second loop.

`decode_step` is a function of tensors. Shapes follow from the number of places and rows alone and
nothing waits for a value, so the same code is captured in a CUDA graph (graphs.py) or runs as it
stands. A piece of prompt is the same forward over a causal run (prefill.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kdtree_engine.cache import CachePool, commit_paths, path_places
from kdtree_engine.drafter.base import Drafter
from kdtree_engine.engine.batch import sampling_rows, tree_inputs
from kdtree_engine.engine.policy import TreePolicy
from kdtree_engine.engine.record import Walk, pack
from kdtree_engine.engine.state import DecodeState, Standing
from kdtree_engine.kernels.gumbel import NoiseWanted
from kdtree_engine.kernels.logit_edits import edit_logits, remember
from kdtree_engine.kernels.top_k import LOG_PROBS, TokenLogProbs, token_log_probs
from kdtree_engine.kernels.tree_accept import tree_accept
from kdtree_engine.kernels.tree_build import BuiltTrees, PlannedTrees, TreePlaces, plan_trees
from kdtree_engine.model import Kimi
from kdtree_engine.sampling import Sampled, sample
from kdtree_engine.types import DraftBlocks


class StepParts(Protocol):
    """What a step works with; the engine is one."""

    target: Kimi
    drafter: Drafter
    pool: CachePool
    policy: TreePolicy
    state: DecodeState
    device: torch.device


class Stopwatch:
    """Seconds per phase of a step, as the host sees them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class StepOptions(NamedTuple):
    """What a step does besides, for requests that ask for it; each combination is a graph of its
    own. edits: penalties, biases and forbidden tokens stand between logits and sampling; costs a
    pass over the logits. log_probs: those of the path's tokens are reported.
    """

    edits: bool = False
    log_probs: bool = False


PLAIN = StepOptions()


@dataclass(frozen=True, eq=False)
class StepOutput:
    """record: [B, record.width] int64. logits: [B * N, V] float32, of every row of the trees; None
    where a captured step let them go.
    """

    record: Tensor
    logits: Tensor | None


def decode_step(
    parts: StepParts,
    places: Tensor,
    rows: int,
    blocks: DraftBlocks | None,
    watch: Stopwatch,
    options: StepOptions = PLAIN,
) -> StepOutput:
    """Advance the requests at places [B] int64 by one tree of at most `rows` rows each.

    blocks: what a host drafter proposed, on the device; None lets a device drafter propose.
    """
    standing = parts.state.at(places)
    length = path_length(parts.drafter, rows)
    planned = draft(parts, standing, rows, blocks, watch)
    trees = planned.trees
    inputs = tree_inputs(standing, planned)
    watch.lap("batch")
    layout = parts.pool.layout
    out = parts.target.forward(
        inputs,
        parts.pool.latents,
        (layout.null_slot, layout.spill_slot),
        parts.drafter.tap_layers,
    )
    watch.lap("forward")
    logits, edits = out.logits, parts.state.edits
    if options.edits:
        assert edits is not None
        logits = edit_logits(logits, edits, places, trees.tokens, planned.ancestors, trees.depths)
    picks = sample(logits, sampling_rows(standing, inputs.positions), planned.noise)
    watch.lap("sample")
    walk = walk_trees(standing, trees, picks, length)
    commit(parts, standing, walk, planned.rows.slots, out.taps)
    parts.state.advance(places, standing, walk.lengths, walk.roots)
    if options.edits and edits is not None:
        remember(edits, places, walk.emitted, walk.lengths)
    record = pack(trees, walk, path_log_probs(out.logits, walk) if options.log_probs else None)
    watch.lap("commit")
    return StepOutput(record, out.logits)


def path_log_probs(logits: Tensor, walk: Walk) -> TokenLogProbs:
    """Of the tokens that the paths emitted, by the target's logits [B * N, V] as they were."""
    requests = walk.indices.shape[0]
    first = torch.arange(0, logits.shape[0], logits.shape[0] // requests, device=logits.device)
    rows = (first[:, None] + walk.indices.clamp(min=0)).flatten()
    return token_log_probs(logits.index_select(0, rows), walk.emitted.flatten(), LOG_PROBS)


def path_length(drafter: Drafter, rows: int) -> int:
    """Rows of the longest path of a tree of `rows` rows: the root and one a drafted depth."""
    return 1 + min(drafter.horizon, rows - 1)


def shared_noise(parts: StepParts, standing: Standing, rows: int) -> NoiseWanted | None:
    """What sampling may read instead of drawing the noise of each row: rows at one depth share
    theirs. Nothing where trees have fewer than two rows a depth.
    """
    length = path_length(parts.drafter, rows)
    if rows < 2 * length:
        return None
    vocab = parts.target.config.vocab_size
    return NoiseWanted(standing.seed, standing.temperature, length, vocab)


def draft(
    parts: StepParts,
    standing: Standing,
    rows: int,
    blocks: DraftBlocks | None,
    watch: Stopwatch,
) -> PlannedTrees:
    """Trees of `rows` rows, padding included; of one row without asking anybody."""
    if rows > 1 and blocks is None:
        assert parts.drafter.on_device, "a host drafter's blocks come with the step"
        # so many in every step, whatever its rows: a guess's bits do not follow the step's size
        blocks = parts.drafter.propose(standing.for_drafter(), parts.policy.nodes)
    if rows == 1 or blocks is None:
        tokens = standing.root.new_empty((standing.root.shape[0], 0, 0))
        blocks = DraftBlocks(tokens, tokens.float())
    watch.lap("draft")
    planned = plan_trees(
        blocks.log_probs,
        blocks.tokens,
        rows - 1,
        TreePlaces(standing.root, standing.context, standing.scratch),
        parts.target.config.max_positions,
        # A path of depth d emits d + 1 tokens: deeper nodes than remaining - 1 could not be used.
        depth_limit=standing.remaining.long() - 1,
        chain=parts.policy.chain,
        noise=shared_noise(parts, standing, rows),
    )
    watch.lap("tree")
    return planned


def walk_trees(standing: Standing, trees: BuiltTrees, picks: Sampled, length: int) -> Walk:
    """From each root to the child whose token was picked, while there is one, `length` rows at
    most. The pick of a row is the next row's token, or the token after the path.
    """
    shape = trees.tokens.shape
    tokens = picks.tokens.view(shape)
    paths = tree_accept(trees.tokens, trees.parents, tokens, length, picks.finite.view(shape))
    lengths = torch.where(standing.remaining > 0, paths.lengths, 0)
    emitted = tokens.gather(1, paths.indices.clamp(min=0))
    return Walk(paths.indices, lengths, emitted, paths.next_tokens, paths.broken)


def commit(
    parts: StepParts, standing: Standing, walk: Walk, slots: Tensor, taps: Tensor | None
) -> None:
    """Move accepted rows, of the trees at slots [B, N], to their places in the cache and show them
    to the drafter.
    """
    commit_paths(parts.pool, slots, walk.indices, walk.lengths, standing.context, standing.pages)
    if taps is None:
        return
    assert parts.drafter.on_device, "only a device drafter is shown the target's states"
    positions, places = path_places(
        parts.pool.layout, walk.indices.shape[1], walk.lengths, standing.context, standing.pages
    )
    first = torch.arange(0, taps.shape[0], slots.shape[1], device=taps.device)
    seen = (first[:, None] + walk.indices.clamp(min=0)).flatten()
    parts.drafter.observe(taps.index_select(0, seen), positions.flatten(), places.flatten())
