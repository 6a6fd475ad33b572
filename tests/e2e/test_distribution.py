"""Sampled tokens follow the model's distribution; `make exact` draws 100,000 in each mode."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.distribution import (
    FILTERS,
    LEVEL,
    MODES,
    Draws,
    check_draws,
    draw_words,
    full_draws,
    p_value,
    quick_draws,
    word_chances,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distribution")


@pytest.mark.parametrize("draws", quick_draws(), ids=str)
def test_words_are_drawn_as_the_model_says(draws: Draws, home: Path) -> None:
    assert check_draws(home, draws).violations == []


@pytest.mark.parametrize(
    ("filters", "wrong"),
    [
        ("no filter", {"temperature": 1.3}),
        ("no filter", {"temperature": 0.8}),
        ("no filter", {"top_p": 0.9}),
        ("top-k", {"top_k": 6}),
        ("top-k", {"top_k": 4}),
        ("top-p", {"top_p": 0.7}),
        ("min-p", {"min_p": 0.2}),
    ],
    ids=str,
)
def test_a_wrong_distribution_is_seen(filters: str, wrong: dict[str, Any], home: Path) -> None:
    draws = Draws("tree", filters, 800, 3)
    counts, _ = draw_words(home, draws, **wrong)
    assert p_value(counts, word_chances(home, FILTERS[filters], 3) * draws.words) < LEVEL


def test_probabilities_of_words(home: Path) -> None:
    for filters in FILTERS.values():
        chances = word_chances(home, filters, 2)
        assert chances.shape == (256,) and float(chances.sum()) == pytest.approx(1, abs=1e-12)


def test_p_values() -> None:
    """Uniform over right counts; none for a word that cannot come; rare words count as pools."""
    draw = torch.Generator().manual_seed(1)
    chance = torch.rand(300, generator=draw, dtype=torch.float64) ** 4
    chance /= chance.sum()
    found = torch.tensor(
        [
            p_value(
                torch.multinomial(chance, 2000, True, generator=draw).bincount(minlength=300),
                2000 * chance,
            )
            for _ in range(400)
        ]
    )
    assert 0.4 < float(found.mean()) < 0.6 and 0.02 < float((found < 0.1).float().mean()) < 0.2
    assert p_value(torch.tensor([50, 50, 1]), torch.tensor([50.0, 51.0, 0.0])) == 0


def test_make_exact_draws_enough() -> None:
    draws = full_draws()
    for mode in MODES:
        assert sum(one.words * one.length for one in draws if one.mode == mode) >= 100_000
    seeds = sorted((one.first_seed, one.words) for one in draws)
    for (first, words), (after, _) in itertools.pairwise(seeds):
        assert first + words <= after, "seeds of their own"
