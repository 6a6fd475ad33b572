"""gumbel, sample and top_k on CUDA, against their references on the same device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels.gumbel import NoiseWanted, gumbel, noise_bounds
from kdtree_engine.kernels.gumbel import cases as gumbel_cases
from kdtree_engine.kernels.gumbel import reference as gumbel_reference
from kdtree_engine.kernels.sample import _launch_sample, sample
from kdtree_engine.kernels.sample import cases as sample_cases
from kdtree_engine.kernels.sample import reference as sample_reference
from kdtree_engine.kernels.top_k import _launch_top, top_log_probs
from kdtree_engine.kernels.top_k import reference as top_reference

pytestmark = pytest.mark.gpu

VOCAB = 163_840


@pytest.mark.parametrize("name", gumbel_cases.CASES)
def test_noise(name: str) -> None:
    case = gumbel_cases.CASES[name]
    seeds, positions = (value.cuda() for value in gumbel_cases.inputs(case))
    got, want = (call(seeds, positions, case.vocab) for call in (gumbel, gumbel_reference.gumbel))
    assert torch.equal(got, want)


def test_the_approximate_noise_is_within_its_bound() -> None:
    """Of 64 rows that are one flat row, the perturbed values themselves come out of top_k."""
    seeds = torch.arange(64, device="cuda")
    positions = torch.full_like(seeds, 5)
    flat = torch.zeros(64, 64, device="cuda")
    heat = torch.ones(64, device="cuda")
    values, ids = top_log_probs(flat, 64, heat, seeds, positions)
    noise = gumbel(seeds, positions, 64)
    want = noise.gather(1, ids) - noise.double().logsumexp(1, keepdim=True)
    assert float((values - want).abs().max()) < 2**-16 + 2**-18
    # and the tail, where the noise is large
    flat = torch.zeros(64, VOCAB, device="cuda")
    values, ids = top_log_probs(flat, 1, heat, seeds, positions)
    noise = gumbel(seeds, positions, VOCAB)
    assert torch.equal(ids[:, 0], noise.argmax(1))
    want = noise.gather(1, ids) - noise.double().logsumexp(1, keepdim=True)
    assert float((values - want).abs().max()) < 2**-16 + 2**-17


def on_device(case: sample_cases.Case, seed: int) -> tuple[Tensor, ...]:
    return tuple(value.cuda() for value in sample_cases.inputs(case, seed))


@pytest.mark.parametrize("name", sample_cases.CASES)
@pytest.mark.parametrize("seed", range(3))
def test_tokens(name: str, seed: int) -> None:
    inputs = on_device(sample_cases.CASES[name], seed)
    got, want = sample(*inputs), sample_reference.sample(*inputs)
    assert torch.equal(got.tokens, want[0]) and torch.equal(got.finite, want[1])


@pytest.mark.parametrize("spread", [0.01, 2.0, 6.0])
@pytest.mark.parametrize("grid", [0.0, 0.5])
def test_tokens_of_the_whole_vocabulary(spread: float, grid: float) -> None:
    case = sample_cases.CASES["mixed"]._replace(rows=61, vocab=VOCAB, spread=spread, grid=grid)
    inputs = list(on_device(case, 0))
    inputs[2][::7] = 2000  # more than there are runs
    want = sample_reference.sample(*inputs)[0]
    got = sample(*inputs).tokens
    assert torch.equal(got, want)
    for rows in (slice(0, 1), slice(17, 18), slice(5, 37)):
        assert torch.equal(sample(*(value[rows] for value in inputs)).tokens, got[rows])
    few = [value[:8] for value in inputs]
    for chunk, margin in ((1024, 2.0**-14), (4096, 2.0**-14), (4096, 0.5)):
        assert torch.equal(_launch_sample(*few, chunk=chunk, margin=margin).tokens, got[:8])


@pytest.mark.parametrize("vocab", [VOCAB, 5001])
@pytest.mark.parametrize("spread", [0.01, 2.0, 6.0])
def test_bounds_of_the_noise_change_no_token(vocab: int, spread: float) -> None:
    """Four requests of 16 rows over 5 positions, of which the bounds know 4."""
    heats, rows = torch.tensor([0.0, 0.7, 1.0, 1.5], device="cuda"), 64
    case = sample_cases.CASES["mixed"]._replace(rows=rows, vocab=vocab, spread=spread)
    inputs = list(on_device(case, 1))
    contexts = torch.tensor([0, 70, 2**31 - 3, 9], dtype=torch.int32, device="cuda")
    seeds = torch.tensor([3, -(2**60), 8, 2**40], device="cuda")
    depth = torch.arange(rows, device="cuda") % 16 % 5
    inputs[1], inputs[5] = (value.repeat_interleave(16) for value in (heats, seeds))
    inputs[6] = contexts.long().repeat_interleave(16) + 1 + depth
    noise = noise_bounds(NoiseWanted(seeds, heats, 4, vocab), contexts)
    assert noise is not None
    positions = (contexts.long()[:, None] + 1 + torch.arange(4, device="cuda")).flatten()
    true = gumbel(seeds.repeat_interleave(4), positions, vocab).view(4, 4, vocab)[1:]
    over = noise.values[1:].double() - true.double()
    assert bool((over > 0).all()) and float(over.max()) < 23 * 1.5 * 2.0**-10 + 2.0**-14
    want = sample_reference.sample(*inputs)[0]
    assert torch.equal(sample(*inputs, noise).tokens, want)
    assert torch.equal(sample(*inputs).tokens, want)
    for tiles in ({"wide": 8}, {"choose_warps": 16}, {"rows_a_tile": 8, "chunk": 2048}):
        assert torch.equal(_launch_sample(*inputs, noise, **tiles).tokens, want)


def test_many_rows() -> None:
    case = sample_cases.Case(300, 20_000, top_p=(1.0, 0.9), temperature=(1.0, 0.0, 0.6))
    inputs = on_device(case, 3)
    got = sample(*inputs)
    assert torch.equal(got.tokens, sample_reference.sample(*inputs)[0])
    assert torch.equal(sample(*(value[:64] for value in inputs)).tokens, got.tokens[:64])


def test_rows_that_cannot_be_sampled() -> None:
    inputs = list(on_device(sample_cases.Case(6, VOCAB, top_p=(0.9, 1.0)), 0))
    inputs[0][0, VOCAB - 1] = float("nan")
    inputs[0][1, 3] = float("inf")
    inputs[0][2] = -float("inf")
    inputs[0][3, : VOCAB - 9] = -float("inf")
    inputs[1][3] = 0.0
    got, want = sample(*inputs), sample_reference.sample(*inputs)
    assert got.finite.tolist() == want[1].tolist() == [False] * 3 + [True] * 3
    assert torch.equal(got.tokens[3:], want[0][3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "k"), [(7, 63), (7, 15), (1, 1), (56, 64)])
def test_top_k(dtype: torch.dtype, rows: int, k: int) -> None:
    """bf16 logits tie often: equal ones go to the smaller token."""
    logits = torch.randn(
        rows, VOCAB, generator=torch.Generator("cuda").manual_seed(0), device="cuda"
    )
    logits = (logits * 4).to(dtype)
    values, ids = top_log_probs(logits, k)
    want, names = top_reference.top_log_probs(logits, k)
    assert torch.equal(ids, names)
    assert float((values - want).abs().max()) < 1e-5
    for chunk, warps, run in ((8192, 8, 64), (1024, 4, 32), (4096, 4, 128)):
        assert torch.equal(_launch_top(logits, k, chunk=chunk, warps=warps, run=run)[1], names)
    alone = top_log_probs(logits[-1:], k)
    assert torch.equal(alone[0], values[-1:]) and torch.equal(alone[1], ids[-1:])


def test_top_k_where_all_lie_in_one_chunk() -> None:
    logits = torch.zeros(2, VOCAB, device="cuda")
    logits[0, 5000:5064] = torch.arange(64, device="cuda").float() + 1
    values, ids = top_log_probs(logits, 64)
    assert ids[0].tolist() == list(range(5063, 4999, -1)) and ids[1].tolist() == list(range(64))
    assert torch.allclose(values[1], torch.full((64,), -12.0066, device="cuda"), atol=1e-4)


def test_top_k_foresees_the_sampled_token() -> None:
    logits = torch.randn(56, VOCAB, device="cuda") * 3
    heat = torch.tensor([1.0, 0.6], device="cuda").repeat(28)
    seeds = torch.arange(56, device="cuda") * 2**40
    off, on, zero = torch.zeros_like(seeds), torch.ones_like(heat), torch.zeros_like(heat)
    drawn = sample(logits, heat, off, on, zero, seeds, seeds + 1).tokens
    ids = top_log_probs(logits, 15, heat, seeds, seeds + 1)[1]
    assert bool((ids[:, 0] == drawn).all())
