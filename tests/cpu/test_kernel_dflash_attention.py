"""dflash_attention_paged: the reference against DFlashModel's own rules, the kernel against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import allow_device_loops
from rowcheck import assert_far, assert_near
from torch import Tensor

from kdtree_engine.kernels import dflash_attention as code
from kdtree_engine.kernels.dflash_attention.cases import PAGED_CASES, PagedCase
from kdtree_engine.kernels.dflash_attention.reference import dflash_attention_paged

PAGE = 64

allow_device_loops()


def make(case: PagedCase, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Inputs with scores of spread about 1, scrambled pages, and NaN wherever nothing is cached."""
    random = torch.Generator().manual_seed(seed)
    batch, length = len(case.contexts), case.block

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    width = max(-(-max(case.contexts) // PAGE), 1) + 1
    order = torch.randperm(batch * width + 3, generator=random)[: batch * width]
    pages = order.view(batch, width).to(torch.int32)
    layer = torch.full((batch * width + 3, PAGE, 2, case.kv_heads, case.head_dim), float("nan"))
    layer = layer.to(dtype)
    for row, context in zip(pages, case.contexts, strict=True):
        for at in range(context):
            layer[row[at // PAGE], at % PAGE] = normal(2, case.kv_heads, case.head_dim)
    both = normal(batch * length, 2, case.kv_heads, case.head_dim)  # as one product gives them
    shape = (batch, length)
    return {
        "query": normal(batch, length, case.heads, case.head_dim),
        "own": (torch.unflatten(both[:, 0], 0, shape), torch.unflatten(both[:, 1], 0, shape)),
        "draft_layer": layer,
        "contexts": torch.tensor(case.contexts, dtype=torch.int32),
        "pages": pages,
        "window": case.window,
        "sliding": case.sliding,
        "causal": case.causal,
    }


def truth(given: dict[str, Any]) -> Tensor:
    """The same in float64, one row and one head at a time, key by key."""
    query, contexts, pages = given["query"].double(), given["contexts"], given["pages"]
    (keys, values), window, sliding = given["own"], given["window"], given["sliding"]
    batch, length, heads, width = query.shape
    group = heads // keys.shape[2]
    out = torch.empty_like(query)
    for b in range(batch):
        context = int(contexts[b])
        for j in range(length):
            position = context + j
            first = 0 if window is None else max(0, context - window)
            past = [
                (int(pages[b, c // PAGE]), c % PAGE)
                for c in range(first, context)
                if sliding is None or position - c < sliding
            ]
            block = [
                i
                for i in range(length)
                if (sliding is None or -sliding < j - i < sliding)
                and (i <= j or not given["causal"])
            ]
            for head in range(heads):
                kv = head // group
                seen = [given["draft_layer"][page, row, :, kv] for page, row in past]
                seen += [torch.stack((keys[b, i, kv], values[b, i, kv])) for i in block]
                pair = torch.stack(seen).double()
                weights = torch.softmax(pair[:, 0] @ query[b, j, head] * width**-0.5, 0)
                out[b, j, head] = weights @ pair[:, 1]
    return out


def launch(given: dict[str, Any], **options: Any) -> Tensor:
    rest = {name: given[name] for name in ("draft_layer", "contexts", "pages")}
    limits = (given["window"], given["sliding"])
    return code._launch(
        given["query"], *given["own"], **rest, limits=limits, causal=given["causal"], **options
    )


@pytest.mark.parametrize("case", PAGED_CASES, ids=lambda case: case.name)
def test_reference_and_kernel(case: PagedCase) -> None:
    given = make(case)
    want = truth(given)
    assert_near(dflash_attention_paged(**given), want, 5e-6)
    assert_near(launch(given), want, 5e-6)


@pytest.mark.parametrize("case", [PAGED_CASES[2], PAGED_CASES[3]], ids=lambda case: case.name)
def test_a_limit_moved_by_one_is_seen(case: PagedCase) -> None:
    given = make(case)
    want = truth(given)
    for name in ("window", "sliding"):
        if given[name] is not None:
            moved = {**given, name: given[name] - 1}
            assert_far(dflash_attention_paged(**moved), want, 5e-6)
            assert_far(launch(moved), want, 5e-6)


def test_causal_is_seen() -> None:
    for case in (PAGED_CASES[6], PAGED_CASES[8], PAGED_CASES[10]):
        given = make(case)
        other = {**given, "causal": not case.causal}
        check = assert_near if case.block == 1 else assert_far
        check(dflash_attention_paged(**other), truth(given), 5e-6)
        check(launch(other), truth(given), 5e-6)


@pytest.mark.parametrize(("splits", "rows"), [(1, 32), (3, 16), (5, 32)])
def test_splits_and_tiles_do_not_change_the_result(splits: int, rows: int) -> None:
    for case in (PAGED_CASES[3], PAGED_CASES[5]):
        given = make(case, seed=splits)
        want = dflash_attention_paged(**given).double()
        assert_near(launch(given, tile=code.Tile(rows, 4, 2), splits=splits), want, 1e-5)


def test_half_precision() -> None:
    given = make(PAGED_CASES[0], torch.float16)
    assert_near(launch(given), truth(given), 5e-3)


def test_the_operator_takes_the_reference_on_a_cpu() -> None:
    given = make(PAGED_CASES[4])
    keys, values = given.pop("own")
    query = given.pop("query")
    got = code.dflash_attention_paged(query, keys, values, **given)
    assert torch.equal(got, dflash_attention_paged(query, (keys, values), **given))


def test_number_of_splits() -> None:
    device = torch.device("cpu")  # counts as 132 multiprocessors
    assert code.choose_splits(1, 65, device) == 65
    assert code.choose_splits(8, 2048, device) == 16
    assert code.choose_splits(200, 2048, device) == 1
