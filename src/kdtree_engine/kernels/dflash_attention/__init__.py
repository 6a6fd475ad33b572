"""Attention of draft blocks over their request's context and over themselves."""

from __future__ import annotations

from kdtree_engine.kernels.dflash_attention.reference import dflash_attention

__all__ = ["dflash_attention"]
