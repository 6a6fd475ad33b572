"""Gated activation silu(gate) * up (arXiv 2002.05202)."""

from __future__ import annotations

from kdtree_engine.kernels.swiglu.reference import swiglu

__all__ = ["swiglu"]
