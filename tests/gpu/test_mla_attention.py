"""Attention kernels on the GPU: near float32, and the same bits for trees, runs, rows and cuts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels.mla_attention.launch import Tiling, attend
from kdtree_engine.kernels.mla_attention.plan import TILE, TablePlan
from kdtree_engine.types import SpanTable

pytestmark = pytest.mark.gpu

KV, ROPE, HEADS, SCALE = 512, 64, 8, 0.14467963
WIDTH = KV + ROPE
# Every instance that a small device also holds; the wider ones are benches/ops/mla_attention.py's.
CUTS = (Tiling(8, 4, 1), Tiling(8, 4, 1, limit=0), Tiling(16, 4, 1, limit=4))
PARENTS = [-1, 0, 0, 1, 2, 2, 4, 6, 6, 8]


def cuts() -> tuple[Tiling, ...]:
    if torch.cuda.get_device_capability() >= (12, 0):
        return CUTS
    return (
        *CUTS,
        Tiling(16, 4, 2, limit=0),
        Tiling(32, 8, 2),
        Tiling(32, 8, 2, limit=0, apart=True),
    )


def text(length: int) -> tuple[Tensor, Tensor]:
    make = torch.Generator("cuda").manual_seed(1)
    keys = torch.randn(length, WIDTH, generator=make, device="cuda")
    queries = torch.randn(length, HEADS, WIDTH, generator=make, device="cuda") * 0.3
    return keys.bfloat16(), queries.bfloat16()


def path_of(parents: Sequence[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def run(
    keys: Tensor, queries: Tensor, context: int, tokens: Tensor, parents: Sequence[int] | None,
    cut: Tiling | None = None, seed: int = 0,
) -> Tensor:  # fmt: skip
    """One request: a causal run of `tokens`, or a tree of them. Unused memory is NaN."""
    rows, width = len(tokens), (context + len(tokens)) // TILE + 3
    latents = torch.full((width + 2, TILE, WIDTH), torch.nan, device="cuda").bfloat16()
    flat = latents.view(-1, WIDTH)
    make = torch.Generator().manual_seed(seed)
    order = torch.randperm(width + 1, generator=make).int().cuda()
    pages = order[None, :width].contiguous()
    at = torch.arange(context + rows, device="cuda")
    where = pages[0][at // TILE].long() * TILE + at % TILE
    flat[where[:context]] = keys[:context]
    own, masks = where[context:], None
    if parents is not None:
        own = int(order[width]) * TILE + torch.arange(rows, device="cuda")
        bits = [sum(1 << j for j in path_of(parents, row)) for row in range(rows)]
        signed = [word - (1 << 64) if word >> 63 else word for word in bits]
        masks = torch.tensor([signed], device="cuda")
    flat[own] = keys[tokens]
    contexts = torch.tensor([context], dtype=torch.int32, device="cuda")
    plan = TablePlan(SpanTable(contexts, pages, masks), own, rows)
    return attend(queries[tokens].contiguous(), latents, plan, SCALE, KV, cut)


@pytest.mark.parametrize("context", [0, 63, 127, 129, 1025, 5000])
def test_trees_runs_rows_and_cuts_agree(context: int) -> None:
    keys, queries = text(context + 400)
    path = path_of(PARENTS, len(PARENTS) - 1)
    tokens = torch.arange(context + 200, context + 200 + len(PARENTS), device="cuda")
    tokens[path] = torch.arange(context, context + len(path), device="cuda")
    follow = torch.arange(context, context + 300, device="cuda")
    expected = run(keys, queries, context, follow, None)[: len(path)]
    seen = keys[: context + len(path)].float()
    scores = queries[context + len(path) - 1].float() @ seen.T * SCALE
    truth = torch.softmax(scores, -1) @ seen[:, :KV]
    assert (expected[-1].float() - truth).norm() < 6e-3 * truth.norm()
    for cut in (None, *cuts()):
        tree = run(keys, queries, context, tokens, PARENTS, cut, seed=2)
        assert torch.isfinite(tree).all()
        assert torch.equal(tree[path], expected), cut
        single = run(keys, queries, context + 2, follow[2:3], [-1], cut)
        assert torch.equal(single[0], expected[2]), cut
        assert torch.equal(run(keys, queries, context, follow[:64], None, cut)[:4], expected[:4])


def test_a_chain_of_64_rows() -> None:
    keys, queries = text(2000)
    tokens = torch.arange(1407, 1471, device="cuda")
    chain = run(keys, queries, 1407, tokens, range(-1, 63))
    assert torch.equal(chain, run(keys, queries, 1407, tokens, None))


def test_an_unused_place_of_a_step_is_finite() -> None:
    latents = torch.full((4, TILE, WIDTH), torch.nan, device="cuda").bfloat16()
    latents[3] = 0.0
    contexts = torch.zeros(2, dtype=torch.int32, device="cuda")
    pages = torch.full((2, 64), 3, dtype=torch.int32, device="cuda")
    masks = torch.zeros(2, 4, dtype=torch.int64, device="cuda")
    slots = torch.full((8,), 3 * TILE, device="cuda")
    plan = TablePlan(SpanTable(contexts, pages, masks), slots, 8)
    query = torch.randn(8, HEADS, WIDTH, device="cuda").bfloat16()
    assert torch.equal(attend(query, latents, plan, SCALE, KV), query.new_zeros(8, HEADS, KV))
