"""Are sampled words drawn from the model's own distribution? A chi-square test of their counts.

A **word** is the first few tokens after one prompt. With so small a vocabulary the probability of
every word is known: the product of its tokens' probabilities, each from the logits after its
prefix, filtered by `keep_mask` and normalised in float64. Words of many seeds, decoded plainly, by
chains or by trees, are counted and compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from e2e.contract import Report, Violation
from e2e.models import TINY
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints.templates import K26
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.sampling import keep_mask

VOCAB, PROMPT = 16, [3, 11, 5]
LOGIT_STD = 1.5
PLACES = 32
LEAST_EXPECTED = 10.0  # words of a cell; rarer ones are pooled
LEVEL = 1e-4  # a right engine fails so often, were the seeds not fixed
MODES: dict[str, int | str] = {"plain": 0, "chain": "chain:3", "tree": 15}
FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.05},
}


@dataclass(frozen=True)
class Draws:
    """How many words of `length` tokens are drawn, how (`MODES`), through which of `FILTERS`."""

    mode: str
    filters: str
    words: int
    length: int

    def __str__(self) -> str:
        return f"{self.words} words of {self.length} tokens, {self.mode}, {self.filters}"

    @property
    def first_seed(self) -> int:
        """Seeds of its own, so that no two draws are the same."""
        place = list(MODES).index(self.mode) * len(FILTERS) + list(FILTERS).index(self.filters)
        return 1_000_000 * (1 + place)


def quick_draws(words: int = 400) -> list[Draws]:
    """Every filter by trees, and all filters at once in the other modes."""
    pairs = [("tree", one) for one in FILTERS] + [("plain", "all"), ("chain", "all")]
    return [Draws(*pair, words, 3) for pair in pairs]


def full_draws(tokens: int = 100_000, length: int = 4) -> list[Draws]:
    """So many tokens in each mode, a quarter of them through each filter and through none."""
    alone = [one for one in FILTERS if one != "all"]
    words = math.ceil(tokens / len(alone) / length)
    return [Draws(mode, one, words, length) for mode in MODES for one in alone]


def check_draws(home: Path, draws: Draws) -> Report:
    """Draw, count, compare. `home` is where the model is written, once."""
    counts, accepted = draw_words(home, draws)
    chance = word_chances(home, FILTERS[draws.filters], draws.length)
    p = p_value(counts, chance * draws.words)
    violations = []
    if p < LEVEL:
        what = f"chi-square gives p = {p:.2g}, below {LEVEL}"
        violations.append(Violation(str(draws), "all", len(PROMPT), what))
    if draws.mode != "plain" and accepted * 20 < draws.words:
        what = f"only {accepted} drafts were accepted, too few to say anything"
        violations.append(Violation(str(draws), "all", len(PROMPT), what))
    return Report(draws.words * draws.length, violations, [])


def draw_words(home: Path, draws: Draws, **wrong: Any) -> tuple[Tensor, int]:
    """How often each word came, [VOCAB ^ length], and the drafts accepted. wrong: settings other
    than the draws say, for a test that must fail.
    """
    llm = _model(home, MODES[draws.mode])
    given = {**FILTERS[draws.filters], **wrong}
    params = SamplingParams(draws.length, **{"temperature": 1.0, **given}, ignore_eos=True)
    seeds = range(draws.first_seed, draws.first_seed + draws.words)
    outs = llm.generate([PROMPT] * draws.words, [replace(params, seed=seed) for seed in seeds])
    llm.engine.check_integrity()
    words = torch.tensor([_number(out.token_ids) for out in outs])
    accepted = sum(sum(out.stats.accepted) for out in outs)
    return words.bincount(minlength=VOCAB**draws.length), accepted


def word_chances(home: Path, filters: dict[str, Any], length: int) -> Tensor:
    """The probability of every word, [VOCAB ^ length] float64, in the order of its digits."""
    rows = _prefix_logits(home, length)
    chances = torch.ones(1, dtype=torch.float64)
    for depth in range(length):
        logits = rows[:: VOCAB ** (length - 1 - depth), depth]
        chances = (chances[:, None] * token_chances(logits, filters)).flatten()
    return chances


@lru_cache(maxsize=4)
def _prefix_logits(home: Path, length: int) -> Tensor:
    """[VOCAB ^ (length - 1), length, VOCAB]: row i of a prefix after its first i tokens."""
    llm = _model(home, 0)
    prefixes = itertools.product(range(VOCAB), repeat=length - 1)
    return torch.stack([llm.logits([*PROMPT, *one])[-length:] for one in prefixes])


def token_chances(logits: Tensor, filters: dict[str, Any]) -> Tensor:
    """[R, VOCAB] float64 at temperature 1 from logits [R, VOCAB]."""
    _, *kept = SamplingParams(temperature=1.0, **filters).filters
    top_k, top_p, min_p = (torch.full((len(logits),), value) for value in kept)
    mask = keep_mask(logits, torch.ones(len(logits)), top_k, top_p, min_p)
    return torch.where(mask, logits.double(), -torch.inf).softmax(-1)


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square, cells of small expectation pooled. 0 for what cannot happen."""
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    pairs = sorted(zip(expected.tolist(), counts.tolist(), strict=True), reverse=True)
    cells, pool = [], (0.0, 0)
    for one, count in pairs:
        pool = (pool[0] + one, pool[1] + count)
        if pool[0] >= LEAST_EXPECTED:
            cells.append(pool)
            pool = (0.0, 0)
    last = cells.pop()
    cells.append((last[0] + pool[0], last[1] + pool[1]))
    statistic = sum((count - one) ** 2 / one for one, count in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, half))


def _number(word: Sequence[int]) -> int:
    total = 0
    for token in word:
        total = total * VOCAB + token
    return total


def _model(home: Path, nodes: int | str) -> LLM:
    folder = home / "distribution"
    if not folder.exists():
        dims = replace(TINY, vocab_size=VOCAB, num_layers=2)
        make_checkpoint(folder, K26, 3, drafter=True, dims=dims, logit_std=LOGIT_STD)
    return LLM(
        folder,
        drafter="none" if nodes == 0 else folder / "drafter",
        device="cpu",
        tree_nodes=nodes,
        max_requests=PLACES,
        cache_pages=2 * PLACES,
    )
