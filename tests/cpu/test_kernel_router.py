"""The router's kernels through Triton's interpreter: choices, weights, shared values, blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kdtree_engine.kernels.router import (
    Blocks,
    RouterSettings,
    _launch_group,
    _launch_route,
    block_bound,
    block_tokens,
    group_choices,
    route,
    route_rows,
)
from kdtree_engine.kernels.router.blocks import group_by_sort
from kdtree_engine.kernels.router.cases import CASES
from kdtree_engine.kernels.swiglu import swiglu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted")


def parts_of(segments: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(segments, rows, columns, generator=generator)


def added(parts: Tensor) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def check_blocks(blocks: Blocks, chosen: Tensor, tokens: int) -> None:
    """Every slot in one block of its expert, the used blocks in order and as few as can be."""
    flat, count = chosen.flatten(), chosen.numel()
    expected = []
    for expert in flat.unique().tolist():
        own = (flat == expert).nonzero().flatten().tolist()
        for start in range(0, len(own), tokens):
            members = own[start : start + tokens]
            expected.append((expert, members + [count] * (tokens - len(members))))
    found = list(zip(blocks.expert.tolist(), blocks.slots.tolist(), strict=True))
    assert found[: len(expected)] == expected
    assert all(expert == -1 for expert, _ in found[len(expected) :])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("rows", [1, 3])
def test_choices_and_weights_are_the_references(case, rows) -> None:
    shared = 40
    parts = parts_of(2, rows, case.experts + 2 * shared)
    bias = torch.randn(case.experts, generator=torch.Generator().manual_seed(1)) - 1.5  # negative
    out = route_rows(parts, bias, case.settings, shared, torch.float32)
    total = added(parts)
    experts, weights = route(total[:, : case.experts].contiguous(), bias, case.settings)
    assert torch.equal(out.experts.long(), experts)
    torch.testing.assert_close(out.weights, weights, rtol=2e-6, atol=0)
    assert out.shared is not None
    torch.testing.assert_close(out.shared, swiglu(total[:, case.experts :]), rtol=2e-6, atol=1e-7)
    if rows > 1:
        tokens = block_tokens(rows, case.settings.top_k, case.experts)
        check_blocks(out.blocks, out.experts, tokens)


def test_one_row_makes_a_block_of_each_choice_in_order() -> None:
    settings = RouterSettings(3, 1, 1, True, 1.0)
    out = route_rows(parts_of(1, 1, 12), torch.zeros(12), settings, 0)
    assert out.shared is None
    assert torch.equal(out.blocks.expert, out.experts[0])
    assert out.blocks.slots.tolist() == [[i] + [3] * 7 for i in range(3)]


def test_equal_scores_go_to_the_smaller_index() -> None:
    settings = RouterSettings(4, 4, 2, True, 1.0)
    parts = torch.zeros(1, 2, 16)
    parts[0, 1, 5] = parts[0, 1, 13] = 1.0
    out = route_rows(parts, torch.zeros(16), settings, 0)
    assert out.experts.tolist() == [[0, 1, 2, 3], [5, 13, 4, 6]]
    experts, _ = route(parts[0], torch.zeros(16), settings)
    assert torch.equal(out.experts.long(), experts)


def test_non_finite_logits_stay_in_their_row_and_name_real_experts() -> None:
    settings = RouterSettings(4, 2, 1, True, 1.0)
    clean = parts_of(1, 3, 16)
    dirty = clean.clone()
    dirty[0, 1] = float("nan")
    bias = torch.zeros(16)
    good, bad = (route_rows(parts, bias, settings, 0) for parts in (clean, dirty))
    assert len(set(bad.experts[1].tolist())) == 4 and int(bad.experts.max()) < 16
    assert torch.isnan(bad.weights[1]).all()
    keep = torch.tensor([0, 2])
    assert torch.equal(good.experts[keep], bad.experts[keep])
    assert torch.equal(good.weights[keep], bad.weights[keep])


def test_a_rows_bits_do_not_depend_on_the_rows() -> None:
    settings, experts, shared = RouterSettings(4, 1, 1, True, 2.827), 16, 24
    parts = parts_of(3, 70, experts + 2 * shared)
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(1)) * 0.1
    whole = route_rows(parts, bias, settings, shared, torch.float16)
    for first, last in ((0, 1), (3, 6), (8, 16)):
        some = parts[:, first:last].contiguous()
        out = route_rows(some, bias, settings, shared, torch.float16)
        apart = _launch_route(some, bias, settings, shared, torch.float16, 8, 2)
        for found in (out, apart):
            assert torch.equal(found.experts, whole.experts[first:last])
            assert torch.equal(found.weights, whole.weights[first:last])
            assert torch.equal(found.shared, whole.shared[first:last])
    check_blocks(whole.blocks, whole.experts, block_tokens(70, 4, experts))


@pytest.mark.parametrize("rows", [9, 64, 300])
@pytest.mark.parametrize("same", [False, True])
def test_blocks_hold_every_choice_once(rows, same) -> None:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, 24, generator=generator).argsort(1)[:, :4].int()
    if same:
        chosen = chosen[:1].repeat(rows, 1)
    for tokens in (8, 32):
        check_blocks(group_by_sort(chosen, 24, tokens), chosen, tokens)
        check_blocks(group_choices(chosen, 24, tokens), chosen, tokens)
        if rows < 300:
            check_blocks(_launch_group(chosen, 24, tokens, 4), chosen, tokens)


def test_the_bound_is_reached_and_never_passed() -> None:
    # Four experts with one slot each but one, which has all the others.
    assert block_bound(1, 8, 384, 8) == 8
    assert block_bound(64, 8, 384, 8) == 400
    assert block_bound(20, 1, 4, 8) == 6  # 17 + 1 + 1 + 1 slots: 3 + 1 + 1 + 1
    assert block_bound(8, 4, 16, 8) == 16
