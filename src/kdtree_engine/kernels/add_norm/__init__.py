"""Add a block's output to the residual stream and norm the sum for the next block."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.add_norm import reference
from kdtree_engine.kernels.launch import has_kernel, launch_options
from kdtree_engine.kernels.rms_norm import norm_shape


def add_norm(y: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + y [R, H], and its RMS norm with weight [H]; both in the residual's dtype.

    y: [R, H], or parts [S, R, width >= H] float32 to be added in order (`linear.product`).
    """
    assert residual.shape[-1:] == weight.shape, f"{list(residual.shape)}, {list(weight.shape)}"
    if not has_kernel(residual) and y.ndim == 2:
        return reference.add_norm(y, residual, weight, eps)
    return _launch(y if y.ndim == 3 else y.unsqueeze(0), residual, weight, eps)


def _launch(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from kdtree_engine.kernels.add_norm.kernel import add_norm_rows

    count, rows, width = parts.shape
    depth = residual.shape[1]
    assert rows == residual.shape[0] and width >= depth and residual.is_contiguous()
    x, normed = torch.empty_like(residual), torch.empty_like(residual)
    block, warps = norm_shape(depth)
    add_norm_rows[(rows,)](
        parts.contiguous(), residual, weight, x, normed, rows, depth, width, eps, count, block,
        num_warps=warps, **launch_options(residual),
    )  # fmt: skip
    return x, normed


__all__ = ["add_norm"]
