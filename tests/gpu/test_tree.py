"""tree_build, tree_mask, tree_accept and cache_commit on CUDA, equal to their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels import cache_commit
from kdtree_engine.kernels.cache_commit import reference as commit_reference
from kdtree_engine.kernels.gumbel import NoiseWanted, noise_bounds
from kdtree_engine.kernels.tree_accept import cases as accept_cases
from kdtree_engine.kernels.tree_accept import reference as accept_reference
from kdtree_engine.kernels.tree_accept import tree_accept
from kdtree_engine.kernels.tree_build import TreePlaces, plan_trees, tree_build
from kdtree_engine.kernels.tree_build import cases as build_cases
from kdtree_engine.kernels.tree_build import reference as build_reference
from kdtree_engine.kernels.tree_mask import cases as mask_cases
from kdtree_engine.kernels.tree_mask import reference as mask_reference
from kdtree_engine.kernels.tree_mask import tree_mask

pytestmark = pytest.mark.gpu


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for field, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.is_cuda and one.dtype == other.dtype, field
        assert torch.equal(one.cpu(), other.cpu()), field


@pytest.mark.parametrize("name", build_cases.CASES)
@pytest.mark.parametrize("seed", range(3))
def test_trees(name: str, seed: int) -> None:
    case = build_cases.CASES[name]
    log_probs, tokens = build_cases.inputs(case, seed)
    want = build_reference.tree_build(log_probs, tokens, case.budget)
    got = tree_build(log_probs.cuda(), tokens.cuda(), case.budget)
    assert_same(got, want)
    alone = tree_build(log_probs[-1:].cuda(), tokens[-1:].cuda(), case.budget)
    assert_same(alone, tuple(value[-1:] for value in want))


@pytest.mark.parametrize("seed", range(40))
def test_ties_disorder_limits_and_chains(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    horizon, width = 1 + seed % 20, 1 + 7 * seed % 64
    log_probs = -torch.rand(300, horizon, width, generator=generator)
    if seed % 2:
        log_probs = (log_probs * 4).round() / 4
    if seed % 3:
        log_probs = log_probs.sort(dim=-1, descending=True).values
    if seed % 5 == 0:
        odd = torch.tensor([float("nan"), float("inf"), -float("inf")])
        broken = torch.rand(log_probs.shape, generator=generator) < 0.1
        pick = torch.randint(0, 3, log_probs.shape, generator=generator)
        log_probs = torch.where(broken, odd[pick], log_probs)
    tokens = torch.randint(0, 163_840, log_probs.shape, generator=generator)
    depth = torch.randint(0, horizon + 2, (300,), generator=generator)
    nodes = torch.randint(0, 70, (300,), generator=generator)
    places = TreePlaces(depth * 7, (nodes * 3).int(), torch.arange(300) * 64)
    options = (63, places, 150, depth, nodes, seed % 7 == 0)
    want = plan_trees(log_probs, tokens, *options)
    on_device = TreePlaces(*(value.cuda() for value in places))
    heat = (torch.arange(300, device="cuda") % 3).float()
    noise = NoiseWanted(torch.arange(300, device="cuda") - 150, heat, 2, 777 + 256 * seed)
    got = plan_trees(
        log_probs.cuda(), tokens.cuda(), 63, on_device, 150, depth.cuda(), nodes.cuda(),
        options[-1], noise,
    )  # fmt: skip
    bounds = noise_bounds(noise, on_device.contexts)
    assert bounds is not None and got.noise is not None
    assert_same((got.noise.values[heat > 0],), (bounds.values[heat > 0],))
    assert_same(got.trees, want.trees)
    assert_same((got.ancestors, *got.rows), (want.ancestors, *want.rows))


@pytest.mark.parametrize("name", mask_cases.CASES)
def test_masks(name: str) -> None:
    parents = mask_cases.inputs(mask_cases.CASES[name])
    assert_same((tree_mask(parents.cuda()),), (mask_reference.tree_mask(parents),))


@pytest.mark.parametrize("name", accept_cases.CASES)
@pytest.mark.parametrize("broken", [False, True])
def test_walks(name: str, broken: bool) -> None:
    trees, picks = accept_cases.inputs(accept_cases.CASES[name])
    length = int(trees.depths.max()) + 1
    finite = torch.rand(picks.shape, generator=torch.Generator().manual_seed(2)) < 0.7
    walk = (trees.tokens, trees.parents, picks)
    want = accept_reference.tree_accept(*walk, length, finite if broken else None)
    on_device = tuple(value.cuda() for value in walk)
    assert_same(tree_accept(*on_device, length, finite.cuda() if broken else None), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", [(576,), (2, 1, 128), (2, 8, 128)])
@pytest.mark.parametrize("length", [1, 8, 64])
def test_commits(dtype: torch.dtype, row: tuple[int, ...], length: int) -> None:
    """Paths of all lengths in one call, beside the reference on the CPU; spill page aside."""
    generator = torch.Generator().manual_seed(length)
    requests, width, total = 6, 3, 6 * 3 + 6 + 1
    before = [torch.randn(total, 64, *row, generator=generator).to(dtype) for _ in range(4)]
    pages = torch.randperm(18, generator=generator).view(requests, width).int()
    slots = (18 + torch.arange(requests))[:, None] * 64 + torch.arange(64)
    indices = torch.rand(requests, 64, generator=generator).argsort(1)[:, :length].sort(1).values
    lengths = torch.tensor([0, 1, length, length, (length + 1) // 2, length])
    contexts = torch.tensor([0, 63, 60, 100, 127, 3 * 64 - 1], dtype=torch.int32)
    move = (slots, indices, lengths, contexts, pages)
    want = [layer.clone() for layer in before]
    commit_reference.commit_paths(want, *move, (total - 1) * 64)
    got = [layer.cuda() for layer in before]
    cache_commit.commit_paths_device(got, *(value.cuda() for value in move), (total - 1) * 64)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.cpu()[:-1], other[:-1])


@pytest.mark.parametrize("count", [1, 9, 64, 256, 300])
def test_overlapping_moves(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    before = [torch.randn(8, 64, 576, generator=generator).bfloat16() for _ in range(3)]
    source = torch.randperm(512, generator=generator)[:count]
    destination = torch.randperm(512, generator=generator)[:count]
    got, want = [layer.cuda() for layer in before], [layer.clone() for layer in before]
    cache_commit.commit_rows(got, source.cuda(), destination.cuda())
    commit_reference.commit_rows(want, source, destination)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(got, want, strict=True))
