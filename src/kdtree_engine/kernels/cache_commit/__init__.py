"""Move the accepted rows of a step from scratch to their places in the cache."""

from __future__ import annotations

from kdtree_engine.kernels.cache_commit.reference import commit_rows

__all__ = ["commit_rows"]
