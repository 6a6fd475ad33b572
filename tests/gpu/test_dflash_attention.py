"""dflash_attention_paged on CUDA: near the reference, deterministic, deaf to unwritten memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels import dflash_attention as code
from kdtree_engine.kernels.dflash_attention.cases import PAGED_CASES, PagedCase
from kdtree_engine.kernels.dflash_attention.reference import dflash_attention_paged

pytestmark = pytest.mark.gpu

PAGE = 64
RANK = PagedCase("rank-of-8", 8, 1, 128, 8, (4500, 63, 0))
RANK_WINDOW = PagedCase("rank-of-8-window", 8, 1, 128, 8, (9000, 4096), window=4096)
WHOLE = PagedCase("whole", 64, 8, 128, 8, (1000,), sliding=600, causal=True)
BOTH_WAYS = PagedCase("whole-both-ways", 64, 8, 128, 8, (1000, 3), sliding=5)
CASES = (*PAGED_CASES, RANK, RANK_WINDOW, WHOLE, BOTH_WAYS)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def make(case: PagedCase, dtype: torch.dtype, garbage: float) -> Inputs:
    """query, own keys, own values, cache, contexts, pages; `garbage` wherever nothing is cached."""
    random = torch.Generator("cuda").manual_seed(1)
    batch, length = len(case.contexts), case.block

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device="cuda").to(dtype)

    width = max(-(-max(case.contexts) // PAGE), 1) + 1
    order = torch.randperm(batch * width + 3, generator=random, device="cuda")[: batch * width]
    pages = order.view(batch, width)
    layer = normal(batch * width + 3, PAGE, 2, case.kv_heads, case.head_dim)
    contexts = torch.tensor(case.contexts, device="cuda")
    written = torch.zeros(layer.shape[0], PAGE, dtype=torch.bool, device="cuda")
    at = torch.arange(width * PAGE, device="cuda").view(width, PAGE)
    written[pages] = at < contexts[:, None, None]
    layer[~written] = garbage
    both = normal(batch, length, 2, case.kv_heads, case.head_dim)
    query = normal(batch, length, case.heads, case.head_dim)
    return query, both[:, :, 0], both[:, :, 1], layer, contexts.int(), pages.int()


def near(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return float((got.double() - want.double()).abs().max()) < tolerance * float(
        want.double().std()
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_reference(case: PagedCase) -> None:
    for dtype, tolerance in ((torch.bfloat16, 0.03), (torch.float32, 1e-5)):
        if dtype == torch.float32 and case.kv_heads * case.head_dim > 256:
            continue  # no such drafter runs in float32
        query, keys, values, layer, contexts, pages = make(case, dtype, float("nan"))
        got = code.dflash_attention_paged(
            query, keys, values, layer, contexts, pages, case.window, case.sliding, case.causal
        )
        want = dflash_attention_paged(
            query.double(), (keys.double(), values.double()), layer.double(), contexts, pages,
            case.window, case.sliding, case.causal,
        )  # fmt: skip
        assert near(got, want, tolerance), case.name


@pytest.mark.parametrize("case", [PAGED_CASES[0], RANK], ids=lambda case: case.name)
def test_deterministic_whatever_lies_in_unwritten_memory(case: PagedCase) -> None:
    limits = (case.window, case.sliding)
    seen = []
    for garbage in (float("nan"), float("inf"), 3.0, 3.0):
        *inputs, contexts, pages = make(case, torch.bfloat16, garbage)
        seen.append(code._launch(*inputs, contexts, pages, limits, causal=case.causal))
    assert all(torch.equal(one, seen[0]) for one in seen)
    assert bool(seen[0].isfinite().all())


def test_one_graph_holds_for_every_context() -> None:
    *inputs, contexts, pages = make(RANK, torch.bfloat16, 0.0)
    code.dflash_attention_paged(*inputs, contexts, pages)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = code.dflash_attention_paged(*inputs, contexts, pages)
    for shorter in ((4500, 63, 0), (1, 64, 17), (0, 0, 0), (4499, 2000, 4500)):
        contexts.copy_(torch.tensor(shorter, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, code.dflash_attention_paged(*inputs, contexts, pages)), shorter


def test_tiles_and_splits_agree() -> None:
    *inputs, contexts, pages = make(RANK, torch.bfloat16, float("nan"))
    base = code.dflash_attention_paged(*inputs, contexts, pages)
    for tile in (code.Tile(64, 4, 3), code.Tile(32, 4, 2), code.Tile(16, 4, 3)):
        for splits in (1, 5, 44):
            got = code._launch(*inputs, contexts, pages, (None, None), tile, splits)
            assert near(got, base, 0.03), (tile, splits)
