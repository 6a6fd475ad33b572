"""Gated activation silu(gate) * up (arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import launch_options
from kdtree_engine.kernels.swiglu import reference


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 I] -> [..., I] in the same dtype, computed in float32."""
    assert gate_up.shape[-1] % 2 == 0, f"{gate_up.shape[-1]} columns are not gate and up"
    return reference.swiglu(gate_up)


def swiglu_sum(gate_up: Tensor, inner: int, dtype: torch.dtype) -> Tensor:
    """[R, inner] from what `linear.product` returns: [R, 2 inner], or parts [S, R, width]."""
    if gate_up.ndim == 2:
        return swiglu(gate_up)
    return _launch(gate_up, inner, dtype)


def _launch(parts: Tensor, inner: int, dtype: torch.dtype) -> Tensor:
    from kdtree_engine.kernels.swiglu.kernel import swiglu_parts

    count, rows, width = parts.shape
    assert 2 * inner <= width, f"{inner} gated columns of parts {list(parts.shape)}"
    out = torch.empty(rows, inner, dtype=dtype, device=parts.device)
    block = 512
    swiglu_parts[(rows, -(-inner // block))](
        parts, out, rows, inner, width, count, block, num_warps=4, **launch_options(parts)
    )
    return out


__all__ = ["swiglu", "swiglu_sum"]
