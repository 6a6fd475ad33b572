"""Sampling: noise that follows seed and position, filters, draws."""

from kdtree_engine.sampling.filters import check_filters, keep_mask
from kdtree_engine.sampling.noise import draw_seed, gumbel, seed_word
from kdtree_engine.sampling.penalties import Edits, check_edits, check_penalties, place_edits
from kdtree_engine.sampling.sample import Sampled, SamplingRows, sample

__all__ = [
    "Edits",
    "Sampled",
    "SamplingRows",
    "check_edits",
    "check_filters",
    "check_penalties",
    "draw_seed",
    "gumbel",
    "keep_mask",
    "place_edits",
    "sample",
    "seed_word",
]
