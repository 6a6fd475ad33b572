"""dflash_attention against float64, and cache_commit over its cases."""

from __future__ import annotations

import pytest
import torch
from rowcheck import assert_far, assert_near
from torch import Tensor

from kdtree_engine.kernels.cache_commit import commit_rows
from kdtree_engine.kernels.cache_commit.cases import CASES as COMMIT_CASES
from kdtree_engine.kernels.cache_commit.cases import Case as CommitCase
from kdtree_engine.kernels.dflash_attention import dflash_attention
from kdtree_engine.kernels.dflash_attention.cases import CASES as DFLASH_CASES
from kdtree_engine.kernels.dflash_attention.cases import Case as DFlashCase


def block_operands(case: DFlashCase) -> tuple[Tensor, tuple, tuple, Tensor]:
    """Query, context (k, v), block (k, v) and a mask in which every row sees itself."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(case.batch, rows, heads, case.head_dim, generator=generator)

    query = draw(case.block, case.heads)
    context = draw(case.context, case.kv_heads), draw(case.context, case.kv_heads)
    block = draw(case.block, case.kv_heads), draw(case.block, case.kv_heads)
    total = case.context + case.block
    mask = torch.rand(case.batch, case.block, total, generator=generator) < 0.7
    mask[:, :, case.context :] |= torch.eye(case.block, dtype=torch.bool)
    return query, context, block, mask


def block_truth(query: Tensor, context: tuple, block: tuple, mask: Tensor) -> Tensor:
    """Float64, a block, a row and a head at a time."""
    batch, rows, heads, dim = query.shape
    keys = torch.cat((context[0], block[0]), 1).double()
    values = torch.cat((context[1], block[1]), 1).double()
    out = torch.empty(query.shape, dtype=torch.float64)
    shared = heads // keys.shape[2]
    for b in range(batch):
        for row in range(rows):
            seen = mask[b, row]
            for head in range(heads):
                k, v = keys[b, seen, head // shared], values[b, seen, head // shared]
                scores = k @ query[b, row, head].double() * dim**-0.5
                out[b, row, head] = torch.softmax(scores, 0) @ v
    return out


@pytest.mark.parametrize("case", DFLASH_CASES, ids=[case.name for case in DFLASH_CASES])
def test_dflash_attention(case: DFlashCase) -> None:
    query, context, block, mask = block_operands(case)
    want = block_truth(query, context, block, mask)
    assert_near(dflash_attention(query, context, block, mask), want, 5e-6)
    assert_far(block_truth(query * 1.01, context, block, mask), want, 5e-6)
    everything = torch.ones_like(mask)
    if not bool(mask.all()):
        assert_far(dflash_attention(query, context, block, everything), want, 5e-6)
    if case.kv_heads > 1:  # consecutive query heads share a key head: not every second one
        other = query.unflatten(2, (-1, case.kv_heads)).transpose(2, 3).flatten(2, 3)
        assert_far(dflash_attention(other, context, block, mask), want, 5e-6)


def test_dflash_attention_of_blocks_in_one_call() -> None:
    """Blocks of a batch do not see one another."""
    query, context, block, mask = block_operands(DFLASH_CASES[1])
    whole = dflash_attention(query, context, block, mask)
    for b in range(query.shape[0]):
        cut = slice(b, b + 1)
        alone = dflash_attention(
            query[cut],
            (context[0][cut], context[1][cut]),
            (block[0][cut], block[1][cut]),
            mask[cut],
        )
        assert torch.allclose(alone, whole[cut], atol=1e-6)


@pytest.mark.parametrize("case", COMMIT_CASES, ids=[case.name for case in COMMIT_CASES])
def test_commit_gathers_before_it_writes(case: CommitCase) -> None:
    """Latents and draft keys alike; nothing but the destinations changes."""
    shapes = ((3, 64, 5), (3, 64, 2, 2, 4))
    before = [torch.randn(shape) for shape in shapes]
    layers = [layer.clone() for layer in before]
    commit_rows(layers, torch.tensor(case.source).long(), torch.tensor(case.destination).long())
    for old, new in zip(before, layers, strict=True):
        old, new = old.flatten(0, 1), new.flatten(0, 1)
        for slot in range(192):
            origin = slot
            if slot in case.destination:
                origin = case.source[case.destination.index(slot)]
            assert torch.equal(new[slot], old[origin]), slot


def test_the_overlap_case_would_catch_a_sequential_copy() -> None:
    [case] = [case for case in COMMIT_CASES if case.name == "overlap"]
    slots = list(range(20))
    for source, destination in zip(case.source, case.destination, strict=True):
        slots[destination] = slots[source]
    assert [slots[place] for place in case.destination] != list(case.source)
