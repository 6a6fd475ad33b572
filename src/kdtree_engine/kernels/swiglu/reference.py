"""silu(gate) * up, from the fused product [gate | up]."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.scalar import scalar


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 I] -> [..., I] in the same dtype, computed in float32.

    silu is written with exp: torch's own silu rounds a vector's tail differently from its body, so
    an element's bits would depend on how many rows stand before it.
    """
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float()
    return (wide / (torch.exp(-wide) + scalar(1.0)) * up.float()).to(gate_up.dtype)
