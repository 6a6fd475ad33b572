"""Log-softmax and the K likeliest tokens of each row."""

from __future__ import annotations

from kdtree_engine.kernels.top_k.reference import top_log_probs

__all__ = ["top_log_probs"]
