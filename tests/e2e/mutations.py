"""Engines that break the contract on purpose, so that its tests are seen to fail.

Each mutation names a mistake that would go unnoticed in the text, or nearly so, and a case that
must report it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from e2e.contract import Case
from kdtree_engine.cache import PageAllocator
from kdtree_engine.engine import step
from kdtree_engine.kernels.linear import reference as linear
from kdtree_engine.kernels.mla_attention import plan
from kdtree_engine.kernels.mla_attention import reference as attention

Mutate = Callable[[pytest.MonkeyPatch], None]

_CASE = Case(
    model="flat",
    nodes=15,
    drafter="replay",
    sampling="greedy",
    dtype="float32",
    requests=2,
    chunk=64,
    lengths="tiles",
    prefix="miss",
    pages="ordered",
)


def products_follow_row_count(patch: pytest.MonkeyPatch) -> None:
    """As a BLAS does: from some number of rows on, another order of summation."""
    original = linear.row_bmm

    def product(x: Tensor, w: Tensor) -> Tensor:
        half = x.shape[2] // 2
        if x.shape[1] <= 4:
            return original(x, w)
        return original(x[..., :half], w[:, :half]) + original(x[..., half:], w[:, half:])

    patch.setattr(linear, "row_bmm", product)


def tiles_fold_backwards(patch: pytest.MonkeyPatch) -> None:
    """Attention adds its tiles last to first."""
    original = attention.fold_tiles
    patch.setattr(attention, "fold_tiles", lambda sums: original(sums.flip(0)))


def siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    """A row's mask also has the row before it, whoever that is."""
    original = step.plan_trees

    def planned(*args: Any, **options: Any) -> Any:
        made = original(*args, **options)
        masks = made.ancestors
        before = torch.arange(masks.shape[1] - 1)
        return made._replace(ancestors=torch.cat((masks[:, :1], masks[:, 1:] | (1 << before)), 1))

    patch.setattr(step, "plan_trees", planned)


def chunks_see_their_end(patch: pytest.MonkeyPatch) -> None:
    """A prompt's rows see all rows of their chunk, later ones too."""
    original = plan._causal

    def causal(*args: Any) -> plan.SpanPlan:
        made = original(*args)
        assert made.shared_hidden is not None
        return replace(made, shared_hidden=made.shared_hidden[:, -1:].expand_as(made.shared_hidden))

    patch.setattr(plan, "_causal", causal)


def commit_forgets_a_row(patch: pytest.MonkeyPatch) -> None:
    """Of a step's rows, the first stays in scratch."""
    original = step.commit_paths

    def commit(
        pool: Any, slots: Any, indices: Any, lengths: Any, contexts: Any, pages: Any
    ) -> None:
        if indices.shape[1] > 1:
            original(pool, slots, indices[:, 1:], lengths - 1, contexts + 1, pages)

    patch.setattr(step, "commit_paths", commit)


def noise_is_the_roots(patch: pytest.MonkeyPatch) -> None:
    """Every node of a tree draws with the noise of the root's position."""
    original = step.sampling_rows

    def rows(*args: Any) -> Any:
        made = original(*args)
        return replace(made, position=made.position[:1].expand_as(made.position))

    patch.setattr(step, "sampling_rows", rows)


def prefix_pages_are_swapped(patch: pytest.MonkeyPatch) -> None:
    """A prefix hit brings the right pages in the wrong order. Keys carry their positions, so only
    the order of summation shows it, from three pages on.
    """
    original = PageAllocator.share_prefix
    patch.setattr(PageAllocator, "share_prefix", lambda *args: list(reversed(original(*args))))


MUTATIONS: dict[Mutate, Case] = {
    products_follow_row_count: _CASE,
    tiles_fold_backwards: _CASE,
    siblings_see_each_other: _CASE,
    chunks_see_their_end: _CASE,
    commit_forgets_a_row: replace(_CASE, nodes=2),
    noise_is_the_roots: replace(_CASE, sampling="p95", requests=1),
    prefix_pages_are_swapped: replace(_CASE, prefix="prompt", lengths="block"),
}
