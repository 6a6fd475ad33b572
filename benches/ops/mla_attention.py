"""Attention of one request on one rank of eight: a chain of draft rows after a long context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kdtree_engine.kernels.mla_attention.launch import Tiling, attend, has_roles, tiling
from kdtree_engine.kernels.mla_attention.plan import TILE, TablePlan
from kdtree_engine.types import SpanTable
from ops.base import Variant

HEADS, KV, ROPE = 8, 512, 64
SCALE = 0.14467963
ROWS = (1, 8, 16, 32, 64)
CONTEXTS = (4096, 32768, 131072)
PAGES = 4096
"""Width of the page table, as an engine's for 262,144 positions: blocks that no key fills."""
WIDE = Tiling(64, apart=True, ahead=True)
# Few kernels, as each takes seconds to compile.
ROLES = replace(WIDE, roles=True)
FEW = (
    replace(ROLES, fold_heads=2, fold_batch=16),
    Tiling(16, stages=3, fold_heads=2, fold_batch=16),
    replace(WIDE, fold_heads=2, fold_batch=16),
    replace(WIDE, fold_heads=2, fold_batch=16, short=16),
    replace(WIDE, fold_heads=8, fold_width=32, fold_batch=16),
)
MANY = (
    ROLES,
    replace(ROLES, fold_heads=8, fold_width=32, fold_batch=16),
    WIDE,
    replace(WIDE, fold_heads=2, fold_batch=16),
    replace(WIDE, fold_heads=8, fold_width=32, fold_batch=16),
)


class _Problem:
    """One span of `rows` in a chain; `layers` caches, so that the L2 is cold."""

    def __init__(self, rows: int, context: int) -> None:
        pages = context // TILE + 3
        # 120 MB of keys, twice an L2, however short the context
        self.layers = max(1, 120_000_000 // (context * (KV + ROPE) * 2))
        make = torch.Generator("cuda").manual_seed(0)
        shape = (self.layers, pages, TILE, KV + ROPE)
        self.latents = torch.randn(shape, generator=make, device="cuda").bfloat16()
        self.query = torch.randn(rows, HEADS, KV + ROPE, generator=make, device="cuda") * 0.3
        self.query = self.query.bfloat16()
        order = torch.randperm(pages - 1, generator=make, device="cuda").int()
        order = torch.cat((order, order.new_zeros(PAGES - order.shape[0])))
        masks = torch.tensor([(2 << row) - 1 for row in range(min(rows, 63))], device="cuda")
        if rows == 64:
            masks = torch.cat((masks, masks.new_full((1,), -1)))
        contexts = torch.tensor([context], dtype=torch.int32, device="cuda")
        self.slots = (pages - 1) * TILE + torch.arange(rows, device="cuda")
        table = SpanTable(contexts, order[None].contiguous(), masks[None])
        self.plan = TablePlan(table, self.slots, rows)

    def run(self, layer: int, cut: Tiling) -> Tensor:
        return attend(self.query, self.latents[layer], self.plan, SCALE, KV, cut)

    def truth(self) -> Tensor:
        """float32 result of layer 0."""
        context = int(self.plan.spans.contexts[0])
        flat = self.latents[0].view(-1, KV + ROPE)
        pages = self.plan.spans.pages[0, : context // TILE].long()
        keys = torch.cat((self.latents[0][pages].view(-1, KV + ROPE), flat[self.slots])).float()
        places = torch.arange(keys.shape[0], device="cuda")
        out = []
        for row in range(self.plan.rows):
            scores = self.query[row].float() @ keys.T * SCALE
            scores = scores.masked_fill(places > context + row, -torch.inf)
            out.append(torch.softmax(scores, -1) @ keys[:, :KV])
        return torch.stack(out)


def _check(problem: _Problem, cut: Tiling, expected: list[Tensor]) -> str | None:
    result = problem.run(0, cut)
    if not expected:
        truth = problem.truth()
        error = float((result.float() - truth).norm() / truth.norm())
        if not error < 6e-3:
            return f"relative error {error:.1e}"
        expected.append(result)
    return None if torch.equal(result, expected[0]) else "not the bits of the first variant"


def _name(cut: Tiling) -> str:
    width = f"{cut.columns} columns" + (f" short {cut.short}" if cut.short < cut.columns else "")
    flags = "".join(f"{name} " for name in ("roles", "apart", "ahead") if getattr(cut, name))
    return (
        f"{width} {cut.warps} warps {flags}{cut.stages} stages "
        f"fold {cut.fold_width} of {cut.fold_heads} x {cut.fold_batch} by {cut.fold_warps}"
    )


def _variant(problem: _Problem, context: int, cut: Tiling, expected: list[Tensor]) -> Variant:
    rows = problem.plan.rows
    return Variant(
        f"mla_attention rows {rows} context {context}: {_name(cut)}",
        lambda layer: problem.run(layer, cut),
        lambda: _check(problem, cut, expected),
        problem.layers,
        context * (KV + ROPE) * 2.0 + rows * HEADS * (2 * KV + ROPE) * 2.0,
        2.0 * rows * HEADS * context * (2 * KV + ROPE),
    )


def variants() -> Iterator[Variant]:
    """The tiling in use, then others: all must have the same bits."""
    for context in CONTEXTS:
        for rows in ROWS:
            problem, expected = _Problem(rows, context), list[Tensor]()
            columns = rows * HEADS
            small = torch.cuda.get_device_capability() >= (12, 0)
            roles = has_roles(problem.query, problem.latents, KV)
            chosen = tiling(columns, small, roles)
            cuts = [chosen] if small else [chosen, *(FEW if columns <= 64 else MANY)]
            cuts = [cut for cut in cuts if roles or not cut.roles]
            for cut in dict.fromkeys(cuts):
                yield _variant(problem, context, cut, expected)
