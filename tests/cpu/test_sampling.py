"""Noise against published vectors, filters against their definition, draws against probability."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine.errors import OptionError
from kdtree_engine.kernels.gumbel import cases as gumbel_cases
from kdtree_engine.kernels.gumbel import reference as gumbel_reference
from kdtree_engine.kernels.sample import cases as sample_cases
from kdtree_engine.kernels.sample import sample as sample_operator
from kdtree_engine.sampling import (
    SamplingRows,
    check_filters,
    draw_seed,
    gumbel,
    keep_mask,
    sample,
    seed_word,
)

Words = tuple[int, ...]

# Random123's known answers for Philox4x32-10: counter, key, output.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
words = st.integers(0, 2**32 - 1)


def plain_philox(counter: Words, key: Words) -> Words:
    """Philox4x32-10 in Python integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = right >> 32 ^ b ^ k, right % 2**32
        c, d = left >> 32 ^ d ^ m, left % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def torch_philox(counter: Words, key: Words) -> Words:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    k, m = (torch.tensor([word]) for word in key)
    return tuple(gumbel_reference.philox((a, b, c, d), (k, m))[0].tolist())


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_known_answers(counter: Words, key: Words, wanted: Words) -> None:
    assert torch_philox(counter, key) == wanted
    assert plain_philox(counter, key) == wanted


@settings(deadline=None)
@given(counter=st.tuples(words, words, words, words), key=st.tuples(words, words))
def test_philox_equals_plain_integers(counter: Words, key: Words) -> None:
    assert torch_philox(counter, key) == plain_philox(counter, key)


@settings(deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**40),
    token=st.integers(0, 300),
)
def test_noise_layout(seed: int, position: int, token: int) -> None:
    noise = gumbel(torch.tensor([seed_word(seed)]), torch.tensor([position]), 301)
    low, high = seed % 2**32, seed % 2**64 >> 32
    counter = (position % 2**32, position >> 32, token // 4, 0)
    uniform = (plain_philox(counter, (low, high))[token % 4] + 0.5) / 2**32
    wanted = torch.tensor(-math.log(-math.log(uniform)), dtype=torch.float32)
    assert abs(float(noise[0, token] - wanted)) <= 2**-23 * abs(float(wanted))


def test_noise_is_finite_at_both_ends() -> None:
    for word in (0, 2**32 - 1):
        uniform = (word + 0.5) / 2**32
        assert 0 < uniform < 1
        assert math.isfinite(-math.log(-math.log(uniform)))


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("vocab", [1, 63, 257, 3072, 3073])
def test_a_row_of_noise_has_the_same_bits_in_any_company(vocab: int) -> None:
    seeds, positions = gumbel_cases.inputs(gumbel_cases.Case(64, vocab))
    whole = gumbel(seeds, positions, vocab)
    assert whole.shape == (64, vocab) and whole.dtype == torch.float32
    for count in (1, 2, 3, 16, 17):
        for start in (0, 5, 64 - count):
            rows = slice(start, start + count)
            assert torch.equal(gumbel(seeds[rows], positions[rows], vocab), whole[rows])


def test_shared_rows_of_noise_are_equal() -> None:
    seeds, positions = gumbel_cases.inputs(gumbel_cases.CASES["demo step"])
    noise = gumbel(seeds, positions, 3072)
    assert torch.equal(noise[0::2], noise[1::2])
    assert not torch.equal(noise[0], noise[2])
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel(seeds[order], positions[order], 3072), noise[order])


def test_noise_of_a_smaller_vocabulary_is_a_prefix() -> None:
    seeds, positions = gumbel_cases.inputs(gumbel_cases.CASES["odd"])
    assert torch.equal(gumbel(seeds, positions, 100), gumbel(seeds, positions, 3072)[:, :100])


def test_seeds() -> None:
    assert seed_word(5) == 5 and seed_word(-1) == -1 == seed_word(2**64 - 1)
    assert seed_word(2**63) == -(2**63) and seed_word(2**64) == 0
    assert len({draw_seed() for _ in range(20)}) == 20
    assert all(0 <= draw_seed() < 2**63 for _ in range(20))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", [name for name in sample_cases.CASES if name != "kimi row"])
def test_a_row_is_sampled_alike_in_any_company(name: str) -> None:
    case = sample_cases.CASES[name]._replace(rows=64)
    inputs = sample_cases.inputs(case)
    whole = sample_operator(*inputs).tokens
    for count in (1, 2, 3, 16):
        for start in range(0, 65 - count, 21):
            part = [value[start : start + count] for value in inputs]
            assert torch.equal(sample_operator(*part).tokens, whole[start : start + count])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(sample_operator(*(value[order] for value in inputs)).tokens, whole[order])


@pytest.mark.parametrize("name", sample_cases.CASES)
@pytest.mark.parametrize("seed", range(4))
def test_a_draw_is_the_best_perturbed_token_that_the_filters_keep(name: str, seed: int) -> None:
    logits, temperature, top_k, top_p, min_p, seeds, positions = sample_cases.inputs(
        sample_cases.CASES[name], seed
    )
    rows = SamplingRows(temperature, top_k, top_p, min_p, seeds, positions)
    result = sample(logits, rows)
    assert bool(result.finite.all())
    kept = keep_mask(logits, temperature, top_k, top_p, min_p)
    hot = torch.where(temperature > 0, temperature, 1.0)[:, None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / hot
    score = scaled + gumbel(seeds, positions, logits.shape[1])
    assert torch.equal(result.tokens, torch.where(kept, score, -torch.inf).argmax(-1))
    assert bool((result.tokens == logits.argmax(-1))[temperature == 0].all())


def slow_keep(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """The filters' definition, word by word, at temperature 1."""
    kept = [top_k == 0 or sum(b > a for b in logits) < top_k for a in logits]
    weights = [math.exp(a - max(logits)) for a in logits]
    total = sum(w for w, k in zip(weights, kept, strict=True) if k)
    above = [sum(w for b, w in zip(logits, weights, strict=True) if b > a) for a in logits]
    kept = [k and (top_p == 1 or m < top_p * total) for k, m in zip(kept, above, strict=True)]
    return [k and w >= min_p for k, w in zip(kept, weights, strict=True)]


@settings(deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=9),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([1.0, 0.97, 0.61, 0.33, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_mean_what_they_say(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    top_p32 = torch.tensor([top_p])
    got = keep_mask(
        torch.tensor([logits]),
        torch.ones(1),
        torch.tensor([top_k]),
        top_p32,
        torch.tensor([min_p]),
    )
    assert got[0].tolist() == slow_keep(logits, top_k, float(top_p32), min_p)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.7, 0.0), (5, 0.9, 0.15)]
)
def test_draws_follow_the_distribution(top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square: 20,000 positions of one seed, then 20,000 seeds of one position."""
    logits = torch.tensor([1.0, -0.5, 2.0, 0.3, -2.0, 1.4, 0.0])
    count, temperature = 20_000, 0.8
    varied, fixed = torch.arange(count), torch.full((count,), 1234)
    rows = torch.full((count,), temperature)
    keep = slow_keep((logits / temperature).tolist(), top_k, top_p, min_p)
    wanted = (logits / temperature).exp() * torch.tensor(keep)
    wanted = wanted / wanted.sum() * count
    for seed, position in ((fixed, varied), (varied, fixed)):
        settings = SamplingRows(
            rows,
            torch.full((count,), top_k),
            torch.full((count,), top_p),
            torch.full((count,), min_p),
            seed,
            position,
        )
        drawn = sample(logits.expand(count, 7), settings).tokens.bincount(minlength=7)
        assert int(drawn[~torch.tensor(keep)].sum()) == 0
        alive = wanted > 0
        chi = float(((drawn - wanted)[alive] ** 2 / wanted[alive]).sum())
        # 99.9% point of chi-square with 6 degrees of freedom; fewer degrees lie below it
        assert chi < 22.5, (chi, drawn.tolist(), wanted.tolist())


def settings_for(count: int, **values: float) -> SamplingRows:
    setting = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **values}
    return SamplingRows.from_lists(
        [setting["temperature"]] * count,
        [int(setting["top_k"])] * count,
        [setting["top_p"]] * count,
        [setting["min_p"]] * count,
        [2**64 - 3] * count,
        list(range(count)),
    )


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 300)
    logits[1, [7, 250]] = 4.0
    logits[2, 299] = 1.0
    assert sample(logits, settings_for(3, temperature=0.0)).tokens.tolist() == [0, 7, 299]


@pytest.mark.parametrize("values", [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"top_k": 2}])
def test_rows_that_cannot_be_sampled_are_flagged(values: dict[str, float]) -> None:
    logits = torch.randn(6, 65, generator=torch.Generator().manual_seed(0))
    clean = sample(logits, settings_for(6, **values))
    logits[1, 3] = torch.nan
    logits[2, 64] = torch.inf
    logits[4] = -torch.inf
    result = sample(logits, settings_for(6, **values))
    assert result.finite.tolist() == [True, False, False, True, False, True]
    assert torch.equal(result.tokens[[0, 3, 5]], clean.tokens[[0, 3, 5]])


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.zeros(500, 65)
    logits[:, :60] = -torch.inf
    for values in ({}, {"top_p": 0.5}, {"top_k": 64}, {"temperature": 1e-30}, {"min_p": 0.5}):
        result = sample(logits, settings_for(500, **values))
        assert bool(result.finite.all())
        assert set(result.tokens.tolist()) == {60, 61, 62, 63, 64}


def test_extreme_temperatures() -> None:
    logits = torch.randn(200, 65, generator=torch.Generator().manual_seed(0)) * 50
    cold = sample(logits, settings_for(200, temperature=1e-38, top_p=0.9))
    assert torch.equal(cold.tokens, logits.argmax(-1))
    hot = sample(logits, settings_for(200, temperature=1e30))
    assert len(set(hot.tokens.tolist())) > 50


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1.0, 0, 1.0, 0.0), "temperature -1.0"),
        ((math.nan, 0, 1.0, 0.0), "temperature nan"),
        ((math.inf, 0, 1.0, 0.0), "temperature inf"),
        ((1.0, -1, 1.0, 0.0), "top_k -1"),
        ((1.0, 0, 0.0, 0.0), "top_p 0.0"),
        ((1.0, 0, 1.5, 0.0), "top_p 1.5"),
        ((1.0, 0, 1.0, -0.1), "min_p -0.1"),
        ((1.0, 0, 1.0, math.nan), "min_p nan"),
    ],
)
def test_settings_out_of_range(values: tuple[float, int, float, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_filters(*values)
    check_filters(0.0, 0, 1.0, 0.0)
    check_filters(2.0, 50, 0.5, 1.0)
