"""Root-mean-square norm (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.kernels.launch import has_kernel, launch_options
from kdtree_engine.kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x [..., D]; weight [D]; result in x's dtype."""
    assert x.shape[-1:] == weight.shape, f"{list(x.shape)} and {list(weight.shape)}"
    if not has_kernel(x):
        return reference.rms_norm(x, weight, eps)
    return _launch(x, weight, eps)


def norm_shape(width: int) -> tuple[int, int]:
    """Elements and warps of a program that norms a row: one layout for every number of rows."""
    block = max(16, 1 << (width - 1).bit_length())
    return block, max(1, min(8, block // 256))


def _launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from kdtree_engine.kernels.rms_norm.kernel import rms_norm_rows

    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block, warps = norm_shape(width)
    rms_norm_rows[(rows.shape[0],)](
        rows, weight, out, width, rows.stride(0), eps, block, num_warps=warps, **launch_options(x)
    )
    return out.view(x.shape)


__all__ = ["norm_shape", "rms_norm"]
