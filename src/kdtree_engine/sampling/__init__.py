"""Sampling: noise that follows seed and position, filters, draws."""

from .filters import check_filters, keep_mask
from .noise import draw_seed, gumbel, seed_word
from .sample import Sampled, SamplingRows, sample

__all__ = [
    "Sampled",
    "SamplingRows",
    "check_filters",
    "draw_seed",
    "gumbel",
    "keep_mask",
    "sample",
    "seed_word",
]
