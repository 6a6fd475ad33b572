"""Root-mean-square norm (arXiv 1910.07467)."""

from __future__ import annotations

from kdtree_engine.kernels.rms_norm.reference import rms_norm

__all__ = ["rms_norm"]
