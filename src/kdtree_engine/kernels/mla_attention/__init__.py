"""Absorbed multi-head latent attention over a paged cache, for causal runs and draft trees.

All heads share one key per token: the cached latent and rotated k_pe [kv_lora + rope]; its first
kv_lora values are also the value (arXiv 2405.04434). `plan_attention` says once a step which cache
slots each row sees; `mla_attention` runs once a layer.
"""

from __future__ import annotations

from kdtree_engine.kernels.mla_attention.plan import AttentionPlan, SpanPlan, plan_attention
from kdtree_engine.kernels.mla_attention.reference import mla_attention

__all__ = ["AttentionPlan", "SpanPlan", "mla_attention", "plan_attention"]
