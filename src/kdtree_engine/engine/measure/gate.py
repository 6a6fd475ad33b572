"""Before anything is timed: rows of one large step have the bits of one-row steps.

The same kernels on the same widths, but a few layers only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.engine.measure.timing import captured
from kdtree_engine.engine.measure.verify import Cache, random_cache, verification
from kdtree_engine.errors import KDTreeError
from kdtree_engine.kernels.cache_commit import commit_rows
from kdtree_engine.model import Kimi
from kdtree_engine.types import SpanTable, StepInputs

CONTEXT = 4 * PAGE_SIZE - 3  # paths cross the border of a page
ROWS = 64
LAYERS = 3
_PAGES = 6
_CHECKED = (0, 1, 2, 17, 40, 63)


def check_rows(target: Kimi, dtype: torch.dtype) -> None:
    """KDTreeError unless a tree's rows, eager and captured, equal plain decoding of their paths."""
    cache = random_cache(target, 1, _PAGES, dtype)
    step = verification(target, cache, 1, ROWS, temperature=0.0)
    step.set_context(CONTEXT)
    step.run()
    logits, parents = step.made["logits"].clone(), step.made["parents"][0].tolist()
    tokens = [int(step.roots[0]), *step.made["tokens"][0, 1:].tolist()]
    if not bool(logits.isfinite().all()) or bool((logits[0] == logits[-1]).all()):
        raise KDTreeError("gate: logits are not finite, or do not depend on the token")
    replay = captured(step.run, target.device)
    replay()
    if not torch.equal(step.made["logits"], logits):
        raise KDTreeError("gate: a captured step gives other bits than an eager one")
    deepest = max(range(ROWS), key=lambda row: len(path_to(parents, row)))
    for row in {*_CHECKED, deepest}:
        path = [tokens[one] for one in path_to(parents, row)]
        if not torch.equal(_plain(target, cache, path), logits[row]):
            raise KDTreeError(
                f"gate: row {row} of a step of {ROWS} rows differs from plain decoding of its "
                f"path of {len(path)}; nothing was timed"
            )


def path_to(parents: list[int], row: int) -> list[int]:
    """Rows from the root to `row`."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def _plain(target: Kimi, cache: Cache, path: list[int]) -> Tensor:
    """Logits [V] after the last token of `path`, decoded one row a step behind the context."""
    device, layout = target.device, cache.layout
    scratch = torch.tensor([layout.scratch_slot(0)], device=device)
    logits = torch.empty(0)
    for position, token in enumerate(path, CONTEXT):
        inputs = StepInputs(
            torch.tensor([token], device=device),
            torch.tensor([position], device=device),
            scratch,
            SpanTable(
                torch.tensor([position], dtype=torch.int32, device=device),
                cache.pages,
                torch.ones(1, 1, dtype=torch.int64, device=device),
            ),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        reserved = (layout.null_slot, layout.spill_slot)
        logits = target.forward(inputs, cache.pool.latents, reserved).logits[0]
        place = cache.pages[0, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE
        commit_rows(cache.pool.latents, scratch, place[None])
    return logits
