"""Weight shapes of the dense products, [out, in] as checkpoints store them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One weight."""

    name: str
    columns: int
    depth: int


CASES = (
    Case("packaged-qkv-a", 192, 256),
    Case("packaged-q-b", 256, 96),
    Case("packaged-output", 256, 256),
    Case("packaged-dense-down", 256, 768),
    Case("packaged-head", 3072, 256),
    Case("router", 16, 256),
    Case("odd", 131, 67),
    Case("one-column", 1, 5),
    Case("k2.6-down-slice", 64, 2048),
)

RANK_SHAPES = {
    "qkv_a": (2112, 7168),
    "q_b": (1536, 1536),
    "o": (7168, 1024),
}
"""(columns, depth) of the products that stay FP8, K2-Instruct's, one rank of eight. DeepSeek-V3 has
twice the heads, so its q_b and o are twice as large.
"""


def launch_everything(device: torch.device, rows: tuple[int, ...] = (1, 16, 64, 256, 512)) -> None:
    """Every launch of a product with an FP8 weight; meta tensors will do.

    For tests that compile what is launched; dense ones are launched by K2.6's forward.
    """
    from kdtree_engine.kernels.linear import product, random_linear

    columns, depth = RANK_SHAPES["qkv_a"]
    weight = random_linear(columns, depth, torch.bfloat16, device, 0.02, quantised=True)
    for count in rows:
        product(torch.empty(count, depth, dtype=torch.bfloat16, device=device), weight)
