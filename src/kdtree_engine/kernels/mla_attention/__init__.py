"""Absorbed multi-head latent attention over a paged cache, for causal runs and draft trees.

All heads share one key per token: the cached latent and rotated k_pe [kv_lora + rope]; its first
kv_lora values are also the value (arXiv 2405.04434). `plan_attention` says once a step which cache
slots each row sees; `mla_attention` runs once a layer.
"""

from __future__ import annotations

from torch import Tensor

from kdtree_engine.kernels.mla_attention import launch, reference
from kdtree_engine.kernels.mla_attention.plan import (
    AttentionPlan,
    SpanPlan,
    TablePlan,
    plan_attention,
)

__all__ = ["AttentionPlan", "SpanPlan", "TablePlan", "mla_attention", "plan_attention"]


def mla_attention(
    query: Tensor,
    latents: Tensor,
    plan: AttentionPlan | TablePlan,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Attention output in latent space, [R, heads, value_dim], in the query's dtype.

    query [R, heads, D]: absorbed, rotated. latents [pages, 64, D]: one layer of the cache, the
    step's own rows already written. A TablePlan needs R = S * N and runs as kernels.
    """
    if isinstance(plan, TablePlan):
        return launch.attend(query, latents, plan, scale, value_dim)
    return reference.mla_attention(query, latents, plan, scale, value_dim)
