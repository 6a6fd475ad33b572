"""The target network and how it is built from a checkpoint."""

from __future__ import annotations

from kdtree_engine.model.kimi import Kimi
from kdtree_engine.model.load import load_target

__all__ = ["Kimi", "load_target"]
