"""DeepSeek-V3 expert choice: sigmoid scores, a bias for the choice only, group limits."""

from __future__ import annotations

from kdtree_engine.kernels.router.reference import RouterSettings, route

__all__ = ["RouterSettings", "route"]
