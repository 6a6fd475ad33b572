"""Routed experts: each row through its own few gated MLPs, added in the router's order."""

from __future__ import annotations

from kdtree_engine.kernels.experts.reference import ExpertWeights, routed_experts

__all__ = ["ExpertWeights", "routed_experts"]
