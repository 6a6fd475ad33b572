"""The step that is measured: build the trees, verify, sample, walk, commit; on fixed shapes.

The draft is given: random candidates stand for a drafter's. The context is as if it were there:
pages of random latents. What a step moves, it moves at its end, and a copy captured at its
beginning moves it back, so that every repeat does the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kdtree_engine.cache import CacheLayout, CachePool
from kdtree_engine.config import MAX_ROWS_PER_REQUEST, PAGE_SIZE
from kdtree_engine.kernels.cache_commit import commit_paths_device
from kdtree_engine.kernels.tree_accept import AcceptedPaths, tree_accept
from kdtree_engine.kernels.tree_build import PlannedTrees, TreePlaces, plan_trees
from kdtree_engine.model import Kimi
from kdtree_engine.sampling import SamplingRows, sample
from kdtree_engine.types import SpanTable, StepInputs

HORIZON = 7  # depths of a draft: the published drafter's block of 8, less the root


@dataclass(frozen=True, eq=False)
class Cache:
    """A pool whose requests have pages of random latents; pages [R, P] int32."""

    pool: CachePool
    pages: Tensor

    @property
    def layout(self) -> CacheLayout:
        """Where things lie."""
        return self.pool.layout


def random_cache(target: Kimi, requests: int, pages: int, dtype: torch.dtype) -> Cache:
    """`pages` scrambled pages for each request, in all layers; the null page stays zero."""
    layout = CacheLayout(requests * pages, requests)
    device, width = target.device, target.config.latent_dim
    latents = []
    for _ in target.layers:
        layer = torch.empty(layout.total_pages, PAGE_SIZE, width, dtype=dtype, device=device)
        layer.normal_()
        layer[layout.null_slot // PAGE_SIZE] = 0
        latents.append(layer)
    order = torch.randperm(layout.pages, device=device).view(requests, pages).int()
    return Cache(CachePool(layout, tuple(latents)), order)


@dataclass(frozen=True, eq=False)
class Verification:
    """`requests` requests of `rows` rows each. `run` enqueues one step; nothing waits."""

    target: Kimi
    cache: Cache
    requests: int
    rows: int
    contexts: Tensor  # [R] int32, what a step advances
    start: Tensor  # [R] int32, what it is set back to
    roots: Tensor  # [R] int64
    drafted: Tensor  # [R, H, K] int64
    log_probs: Tensor  # [R, H, K] float32
    settings: SamplingRows
    scratch: Tensor  # [R] int64, where each request's rows begin
    slots: Tensor  # [R, N] int64, where they lie
    everything: Tensor  # [R * N] int64, all rows
    made: dict[str, Tensor] = field(default_factory=dict)  # what the last run made

    def run(self) -> None:
        """One step."""
        self.contexts.copy_(self.start)
        places = TreePlaces(self.roots, self.contexts, self.scratch)
        most = self.target.config.max_positions
        planned = plan_trees(self.log_probs, self.drafted, self.rows - 1, places, most)
        logits = self.logits(planned)
        positions = planned.rows.positions.flatten() + 1
        picks = sample(logits, replace(self.settings, position=positions))
        trees, chosen = planned.trees, picks.tokens.view(self.requests, self.rows)
        paths = tree_accept(trees.tokens, trees.parents, chosen, HORIZON + 1)
        self.commit(paths)
        self.contexts.add_(paths.lengths)
        self.made.update(
            logits=logits, tokens=trees.tokens, parents=trees.parents, roots=paths.next_tokens
        )

    def logits(self, planned: PlannedTrees) -> Tensor:
        """float32 [R * N, V] of all rows."""
        rows = planned.rows
        inputs = StepInputs(
            rows.tokens.flatten(),
            rows.positions.flatten(),
            rows.slots.flatten(),
            SpanTable(self.contexts, self.cache.pages, planned.ancestors),
            self.everything,
        )
        layout = self.cache.layout
        reserved = (layout.null_slot, layout.spill_slot)
        return self.target.forward(inputs, self.cache.pool.latents, reserved).logits

    def commit(self, paths: AcceptedPaths) -> None:
        """Accepted rows to their places."""
        commit_paths_device(
            self.cache.pool.latents,
            self.slots,
            paths.indices,
            paths.lengths,
            self.contexts,
            self.cache.pages,
            self.cache.layout.spill_slot,
        )

    def set_context(self, context: int) -> None:
        """From now on every request has this many cached tokens."""
        self.start.fill_(context)


def verification(
    target: Kimi, cache: Cache, requests: int, rows: int, temperature: float, seed: int = 0
) -> Verification:
    """A step of `rows` rows a request, with random roots and drafts."""
    assert 1 <= rows <= MAX_ROWS_PER_REQUEST
    device, vocab = target.device, target.config.vocab_size
    random = torch.Generator().manual_seed(seed)
    width = max(1, min(rows - 1, vocab))
    ranked = torch.randn(requests, HORIZON, 4 * width, generator=random) * 2
    log_probs = ranked.log_softmax(2).sort(2, descending=True).values[..., :width]
    drafted = torch.stack(
        [torch.randperm(vocab, generator=random)[:width] for _ in range(requests * HORIZON)]
    ).view(requests, HORIZON, width)
    count = requests * rows
    settings = SamplingRows.from_lists(
        [temperature] * count, [0] * count, [1.0] * count, [0.0] * count, [seed] * count,
        [0] * count, device,
    )  # fmt: skip
    scratch = torch.tensor([cache.layout.scratch_slot(place) for place in range(requests)])
    slots = scratch[:, None] + torch.arange(rows)
    return Verification(
        target,
        cache,
        requests,
        rows,
        torch.zeros(requests, dtype=torch.int32, device=device),
        torch.zeros(requests, dtype=torch.int32, device=device),
        torch.randint(vocab, (requests,), generator=random).to(device),
        drafted.to(device),
        log_probs.to(device),
        settings,
        scratch.to(device),
        slots.to(device),
        torch.arange(count, device=device),
    )
