"""The kernels of gumbel, sample and top_k, interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels.gumbel import NoiseBounds, _launch_bounds, _launch_gumbel, gumbel
from kdtree_engine.kernels.gumbel import cases as gumbel_cases
from kdtree_engine.kernels.sample import MARGIN, _launch_sample, sample
from kdtree_engine.kernels.sample import cases as sample_cases
from kdtree_engine.kernels.top_k import (
    LOG_PROBS,
    TokenLogProbs,
    _launch_log_probs,
    _launch_top,
    token_log_probs,
    top_log_probs,
)

pytest.importorskip("triton")
kernel = pytest.importorskip("kdtree_engine.kernels.sample.kernel")

NAMES = [name for name in sample_cases.CASES if name != "kimi row"]


@pytest.mark.parametrize("case", [(1, 1), (3, 257), (2, 2100)])
def test_noise(case: tuple[int, int]) -> None:
    seeds, positions = gumbel_cases.inputs(gumbel_cases.Case(*case))
    assert torch.equal(_launch_gumbel(seeds, positions, case[1]), gumbel(seeds, positions, case[1]))


def small(name: str, rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    case = sample_cases.CASES[name]
    return sample_cases.inputs(case._replace(rows=rows, vocab=min(case.vocab, 1500)), seed)


def bounds_for(inputs: tuple[Tensor, ...], requests: int, depths: int) -> NoiseBounds:
    """Of the rows cut into requests, `depths` positions from each one's first row on."""
    temperature, seeds, positions = (inputs[which].view(requests, -1)[:, 0] for which in (1, 5, 6))
    hot = torch.ones_like(temperature)
    return _launch_bounds(seeds, (positions - 1).int(), hot, depths, inputs[0].shape[1], block=64)


def test_bounds_are_no_smaller_than_the_noise() -> None:
    seeds, contexts = torch.tensor([3, -(2**60), 8]), torch.tensor([0, 2**31 - 3, 77]).int()
    heat, depths, vocab = torch.tensor([0.4, 1.0, 0.0]), 3, 5001
    values, _ = _launch_bounds(seeds, contexts, heat, depths, vocab)
    positions = contexts[:, None].long() + 1 + torch.arange(depths)
    pairs = seeds[:, None].expand_as(positions)[:2], positions[:2]
    noise = gumbel(*(value.flatten() for value in pairs), vocab).view(2, depths, vocab)
    over = values[:2].double() - noise.double()
    assert bool((over > 0).all())
    assert bool((over < 23 * 1.5 * 2.0**-10 + 2.0**-14).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depths", [1, 8])
def test_bounds_of_the_noise_change_no_token(name: str, depths: int) -> None:
    """Two requests; at one depth most rows lie beyond the bounds and draw for themselves."""
    inputs = small(name, 10 if name == "mixed" else 4, seed=3)
    inputs[6][-2:] += 2**33  # no request's position
    noise = bounds_for(inputs, 2, depths)
    got, want = _launch_sample(*inputs, noise, chunk=512, wide=4), sample(*inputs)
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.finite, want.finite)


def test_bounds_are_read() -> None:
    """Wrong ones change tokens: a far too large bound hides the rest until its run is looked at, a
    far too small one hides a run for good.
    """
    inputs = small("plain", 4)
    noise = bounds_for(inputs, 1, 2)
    want = sample(*inputs).tokens
    noise.values[0, 1, :] = -60.0
    noise.values[0, 1, 1024:] = 20.0
    got = _launch_sample(*inputs, noise, chunk=512).tokens
    assert torch.equal(got[:2], want[:2])
    hidden = want < 1024
    assert bool(hidden[2:].any()) and bool((got != want)[2:][hidden[2:]].all())


@pytest.mark.parametrize("name", NAMES)
def test_tokens(name: str) -> None:
    inputs = small(name, 20 if name == "mixed" else 3)
    got, want = _launch_sample(*inputs, chunk=512), sample(*inputs)
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.finite, want.finite)


@pytest.mark.parametrize("name", ["plain", "flat", "ties"])
def test_neither_chunk_nor_margin_nor_company_changes_a_token(name: str) -> None:
    inputs = small(name, 3, seed=1)
    want = _launch_sample(*inputs, chunk=1024).tokens
    # a wide margin makes many tokens candidates for the exact noise
    assert torch.equal(_launch_sample(*inputs, chunk=256, margin=0.7).tokens, want)
    alone = [value[2:3] for value in inputs]
    assert torch.equal(_launch_sample(*alone).tokens, want[2:3])
    assert torch.equal(_launch_sample(*inputs, margin=MARGIN).tokens, sample(*inputs).tokens)


def test_the_vocabulary_may_be_wide_and_its_filters_rare() -> None:
    """top-k beyond the number of runs, so that its level is found over the whole row."""
    logits, *_, seeds, positions = small("plain", 4)
    temperature = torch.tensor([1.0, 3.0, 0.5, 1.0])
    top_k = torch.tensor([30, 1499, 3, 7])
    top_p = torch.tensor([0.5, 0.3, 0.9, 0.0])
    inputs = (logits, temperature, top_k, top_p, torch.zeros(4), seeds, positions)
    assert torch.equal(_launch_sample(*inputs, chunk=256).tokens, sample(*inputs).tokens)


@pytest.mark.parametrize(("likely", "shelf"), [(0.0, 0), (-30.0, 64)])
def test_what_is_looked_at_first_changes_no_token(
    likely: float, shelf: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few or most runs counted at first, masses by the sum of the row, no shelf or a small one."""
    inputs = small("mixed", 12, seed=2)
    want = sample(*inputs).tokens
    monkeypatch.setattr(kernel, "LIKELY", likely)
    monkeypatch.setattr(kernel, "ROUGH", 0.9)
    monkeypatch.setattr("kdtree_engine.kernels.sample.SHELF", shelf or 1)
    got = _launch_sample(*inputs, chunk=512, rows_a_tile=1, wide=1).tokens
    assert torch.equal(got, want)


def test_limits_that_the_rough_sum_cannot_tell() -> None:
    """The likeliest token has half of the mass, as nearly as top-p: are others kept beside it?"""
    rows, vocab = 8, 900
    logits = torch.zeros(rows, vocab)
    logits[:, 700] = math.log(vocab - 1)
    share = 1 / (1 + (vocab - 1) * math.exp(-float(logits[0, 700])))
    top_p = torch.tensor([share + step * 2.0**-20 for step in (-3, -2, -1, -1, 1, 1, 2, 3)])
    off, zero = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    inputs = (logits, zero + 1, off, top_p, zero, torch.arange(rows) + 1, off)
    want = sample(*inputs).tokens
    assert torch.equal(_launch_sample(*inputs, chunk=512).tokens, want)
    free = sample(*inputs[:3], zero + 1, *inputs[4:]).tokens
    assert bool(((free != 700) & (top_p < share) & (want == 700)).any())  # rejected, narrowly
    assert bool(((free != 700) & (top_p > share) & (want == free)).any())  # kept, narrowly


def test_very_cold_rows() -> None:
    logits, _, *rest = small("demo step", 4)
    inputs = (logits * 1e-30, torch.tensor([1e-31, 1e-30, 3e-30, 1e-38]), *rest)
    got, want = _launch_sample(*inputs, chunk=512), sample(*inputs)
    assert torch.equal(got.tokens, want.tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_sampled(temperature: float) -> None:
    logits, _, *rest = small("demo step", 5)
    logits[0, 700] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = -float("inf")
    logits[3, :1400] = -float("inf")
    inputs = (logits, torch.full((5,), temperature), *rest)
    got, want = _launch_sample(*inputs, chunk=256), sample(*inputs)
    assert got.finite.tolist() == want.finite.tolist() == [False, False, False, True, True]
    assert torch.equal(got.tokens[3:], want.tokens[3:]) and int(got.tokens[3]) >= 1400
    assert bool(((got.tokens >= 0) & (got.tokens < logits.shape[1])).all())


def test_greedy_takes_the_first_of_the_largest() -> None:
    inputs = list(small("greedy", 2))
    inputs[0] = torch.zeros_like(inputs[0])
    inputs[0][1, [40, 900]] = 1.0
    assert _launch_sample(*inputs, chunk=256).tokens.tolist() == [0, 40]


@pytest.mark.parametrize(
    ("shape", "k", "chunk"),
    [((3, 3000), 15, 512), ((3, 40), 63, 64), ((1, 160), 1, 64), ((2, 2000), 64, 1024)],
)
@pytest.mark.parametrize("ties", [False, True])
def test_top_k(shape: tuple[int, int], k: int, chunk: int, ties: bool) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(k)) * 3
    if ties:
        logits = (logits / 2).round()
    values, ids = _launch_top(logits, k, chunk=chunk)
    want, names = top_log_probs(logits, k)
    assert ids.dtype == torch.int64 and torch.equal(ids, names)
    assert torch.allclose(values, want, rtol=0, atol=2e-6)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(names, order)  # equal values by rising id
    assert torch.equal(_launch_top(logits, k, chunk=chunk, run=4)[1], names)  # many more runs
    other = _launch_top(logits[-1:], k, chunk=chunk)
    assert torch.equal(other[0], values[-1:]) and torch.equal(other[1], ids[-1:])


def test_top_k_of_broken_rows() -> None:
    logits = torch.randn(4, 700)
    logits[0, 5], logits[1, 600] = float("nan"), float("inf")
    logits[2, 10:] = -float("inf")
    values, ids = _launch_top(logits, 20, chunk=256)
    assert not bool(torch.isfinite(values[:2]).any())
    assert torch.equal(torch.isfinite(values[2]), torch.arange(20) < 10)
    assert torch.equal(ids[3], top_log_probs(logits[3:], 20)[1][0])
    assert all(len(set(row)) == 20 and 0 <= min(row) <= max(row) < 700 for row in ids.tolist())


def test_top_k_foresees_the_noise() -> None:
    """Rows at T > 0 rank logits / T + noise, as sampling does; rows at 0 do not."""
    logits = torch.randn(4, 900, generator=torch.Generator().manual_seed(0)) * 2
    heat = torch.tensor([0.0, 1.0, 0.3, 1.5])
    seeds, positions = torch.arange(4) - 2, torch.arange(4) + 2**33
    got = _launch_top(logits, 12, heat, seeds, positions, chunk=256)
    want = top_log_probs(logits, 12, heat, seeds, positions)
    assert torch.equal(got[1], want[1])
    assert torch.allclose(got[0], want[0], rtol=0, atol=2e-4)
    off, on = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    drawn = sample(logits, heat, off, on, torch.zeros(4), seeds, positions).tokens
    assert torch.equal(got[1][:, 0], drawn)


def same_log_probs(one: TokenLogProbs, other: TokenLogProbs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("operator", [token_log_probs, _launch_log_probs])
@pytest.mark.parametrize("shape", [(4, 2100), (5, 257), (4, 11)])
def test_log_probs(operator: Callable[..., TokenLogProbs], shape: tuple[int, int]) -> None:
    """Against float64; rows alone and in any company, from other places in memory, to the bit."""
    rows, vocab = shape
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(shape, generator=generator) * 8).round() / 2  # many are equal
    logits[0, vocab // 2 :] = -torch.inf
    ranks = torch.arange(rows)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    chosen = order.gather(1, (ranks % vocab)[:, None])[:, 0]
    got = operator(logits, chosen, LOG_PROBS)
    want = logits.double().log_softmax(-1)
    assert got.tokens.shape == (rows, min(LOG_PROBS, vocab)) and got.tokens.dtype == torch.int64
    assert torch.equal(got.tokens, order[:, :LOG_PROBS])
    close = {"rtol": 0, "atol": 1e-5}
    assert torch.allclose(got.values.double(), want.gather(1, got.tokens), **close)
    assert torch.allclose(got.chosen.double(), want.gather(1, chosen[:, None])[:, 0], **close)
    listed = got.values.gather(1, (ranks % vocab)[:, None])[:, 0]
    assert torch.equal(got.chosen, listed)  # the chosen token's rank is its row's number
    for part in (slice(0, 1), slice(3, 4), slice(1, rows)):
        part_of = TokenLogProbs(*(value[part] for value in got))
        assert same_log_probs(operator(logits[part], chosen[part], LOG_PROBS), part_of)
    wide = torch.zeros(rows, vocab + 3)
    wide[:, 1:-2] = logits
    for part in (slice(0, rows), slice(2, 3)):
        moved = operator(wide[part, 1:-2], chosen[part], LOG_PROBS)
        assert same_log_probs(moved, TokenLogProbs(*(value[part] for value in got)))


def test_log_probs_do_not_follow_the_number_of_rows() -> None:
    """Nor the threads: rows long enough that torch splits a sum among them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(13, 70_001, generator=generator)
    chosen = torch.arange(13)
    got = token_log_probs(logits, chosen)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for row in range(13):
                alone = token_log_probs(logits[row : row + 1], chosen[row : row + 1])
                assert same_log_probs(alone, TokenLogProbs(*(v[row : row + 1] for v in got)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("operator", [token_log_probs, _launch_log_probs])
def test_log_probs_of_broken_rows(operator: Callable[..., TokenLogProbs]) -> None:
    logits = torch.randn(4, 300)
    logits[0, 5], logits[1, 200] = float("nan"), float("inf")
    logits[2] = -float("inf")
    got = operator(logits, torch.tensor([1, 2, 3, 4]), LOG_PROBS)
    assert torch.isfinite(got.chosen).tolist() == [False, False, False, True]
    assert torch.isfinite(got.values).any(1).tolist() == [False, False, False, True]
    assert bool(((got.tokens >= 0) & (got.tokens < 300)).all())


@pytest.mark.parametrize(("tokens", "columns"), [(900, 333), (5000, 700), (70, 70)])
def test_top_k_of_a_reduced_vocabulary(tokens: int, columns: int) -> None:
    """Columns have the noise of the tokens they stand for: a choice among all tokens, of which the
    others are impossible, is the same choice.
    """
    draw = torch.Generator().manual_seed(tokens)
    names = torch.randperm(tokens, generator=draw)[:columns].sort().values
    logits = torch.randn(5, columns, generator=draw) * 2
    logits[:, 7] = logits[:, 60]
    heat = torch.tensor([0.0, 1.0, 0.3, 1.5, 0.0])
    seeds, positions = torch.arange(5) - 2, torch.arange(5) + 2**33
    whole = torch.full((5, tokens), -torch.inf)
    whole[:, names] = logits
    for noise in ((), (heat, seeds, positions)):
        want = top_log_probs(whole, 12, *noise)
        named: Any = (*noise, *(None,) * (3 - len(noise)), names)
        for got in (
            top_log_probs(logits, 12, *named),
            _launch_top(logits, 12, *named),
            _launch_top(logits, 12, *named, chunk=256, run=4),
        ):
            assert torch.equal(got[1], want[1])
            assert torch.allclose(got[0], want[0], rtol=0, atol=2e-4)
    drawn = top_log_probs(logits, 1, heat, seeds, positions)[1]
    assert columns == tokens or not torch.equal(names[drawn], want[1][:, :1])
