"""Rotary position embedding, plain and YaRN, in both layouts of this family."""

from __future__ import annotations

from kdtree_engine.kernels.rope.reference import (
    Angles,
    RopeTable,
    inverse_frequencies,
    rope_table,
    rotate_half,
    rotate_interleaved,
)

__all__ = [
    "Angles",
    "RopeTable",
    "inverse_frequencies",
    "rope_table",
    "rotate_half",
    "rotate_interleaved",
]
