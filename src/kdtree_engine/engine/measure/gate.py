"""Before anything is timed: rows of one large step have the bits of one-row steps.

The same kernels on the same widths, but a few layers only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.cache import CacheLayout
from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.drafter.base import DraftState, stack_blocks
from kdtree_engine.drafter.random import RandomDrafter
from kdtree_engine.engine.measure.decoding import Decoding, decoding, random_pool
from kdtree_engine.errors import KDTreeError
from kdtree_engine.model import Kimi

CONTEXT = 4 * PAGE_SIZE - 3  # paths cross the border of a page
ROWS = 64
LAYERS = 3
_PAGES = 6
_ROOT = 1
_CHECKED = (0, 1, 2, 17, 40, 63)


def check_rows(target: Kimi, dtype: torch.dtype) -> None:
    """KDTreeError unless a tree's rows, eager and captured, equal plain decoding of their paths."""
    pool = random_pool(target, CacheLayout(_PAGES, 1), dtype)
    draft = RandomDrafter(target.config.vocab_size).propose([DraftState(0, [_ROOT])], ROWS - 1)
    blocks = stack_blocks(draft)
    eager = decoding(target, pool, ROWS, [_ROOT], blocks, eager=True)
    logits, parents, tokens = _tree(eager)
    if not bool(logits.isfinite().all()) or bool((logits[0] == logits[-1]).all()):
        raise KDTreeError("gate: logits are not finite, or do not depend on the token")
    captured, _, _ = _tree(decoding(target, pool, ROWS, [_ROOT], blocks))
    if not torch.equal(captured, logits):
        raise KDTreeError("gate: a captured step gives other bits than an eager one")
    plain = decoding(target, pool, 1, [_ROOT], None)
    deepest = max(range(ROWS), key=lambda row: len(path_to(parents, row)))
    for row in sorted({*_CHECKED, deepest}):
        path = [tokens[one] for one in path_to(parents, row)]
        if not torch.equal(_plain(plain, path), logits[row]):
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


def _tree(step: Decoding) -> tuple[Tensor, list[int], list[int]]:
    """Logits [ROWS, V], parents and tokens of the rows of a step behind the context."""
    step.engine.runner.keep_logits = True
    step.stand(CONTEXT)
    landed = step.launch()
    tree = landed.records[0].tree
    assert landed.logits is not None and tree.nodes == ROWS - 1
    return landed.logits.clone(), tree.parents.tolist(), [_ROOT, *tree.tokens[1:].tolist()]


def _plain(step: Decoding, path: list[int]) -> Tensor:
    """Logits [V] after the last token of `path`, decoded one row a step behind the context."""
    step.engine.runner.keep_logits = True
    logits: Tensor | None = None
    for position, token in enumerate(path, CONTEXT):
        step.requests[0].tokens[-1] = token
        step.stand(position)
        logits = step.launch().logits
    assert logits is not None
    return logits[0]
