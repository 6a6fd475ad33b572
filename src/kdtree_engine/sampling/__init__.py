"""Sampling: noise that follows seed and position, filters, draws."""

from kdtree_engine.sampling.filters import check_filters, keep_mask
from kdtree_engine.sampling.noise import draw_seed, gumbel, seed_word
from kdtree_engine.sampling.sample import Sampled, SamplingRows, sample

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
