"""Products whose weights are FP8: K2-Instruct and DeepSeek-V3, one rank of eight.

Checked against the same kernels over the weights in bfloat16, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kdtree_engine.kernels.experts import (
    PackedExperts,
    expert_mlp,
    pack_experts,
    random_packed_experts,
)
from kdtree_engine.kernels.experts.packing import unpack_expert
from kdtree_engine.kernels.linear.cases import RANK_SHAPES
from kdtree_engine.kernels.router import RouterSettings
from ops import dense, experts
from ops.base import Variant
from ops.experts import BF16, CUDA, HIDDEN, INNER, SHARED, Inputs, Judge, Model

MODELS = (
    Model("k2-instruct ", 384, experts.SETTINGS, 2),
    Model("deepseek-v3 ", 256, RouterSettings(8, 8, 4, True, 2.5), 2),
)
ROWS = (1, 8, 16, 64)
LAYERS = experts.LAYERS


def in_bfloat16(packed: PackedExperts) -> PackedExperts:
    """The same experts, dense."""
    assert packed.shared_down is not None
    shared = unpack_expert(packed.shared_down, 0, False)
    count = packed.up.weight.shape[0]
    pairs = (
        (unpack_expert(packed.up, expert, True), unpack_expert(packed.down, expert, False))
        for expert in range(count)
    )
    return pack_experts(pairs, count, shared, BF16, CUDA)


def judge_of(inputs: Inputs, packed: PackedExperts, dense_ones: PackedExperts) -> Judge:
    """Near the reference, and the bits of the dense experts."""
    judge = Judge(experts.wanted_down(inputs, packed))
    first: Tensor = expert_mlp(inputs.x, inputs.routing, dense_ones).down_out
    assert judge(first) is None, "the dense experts are not near the reference"
    return judge


def expert_variants(model: Model) -> Iterator[Variant]:
    """Up and down at every row count."""
    layers = [
        random_packed_experts(model.experts, HIDDEN, INNER, SHARED, CUDA, planes=model.planes)
        for _ in range(LAYERS)
    ]
    dense_ones = in_bfloat16(layers[0])
    for rows in ROWS:
        inputs = experts.make_inputs(rows, model)
        judge = judge_of(inputs, layers[0], dense_ones)
        yield from experts.up_variants(inputs, layers, judge)
        yield from experts.down_variants(inputs, layers, judge)


def variants() -> Iterator[Variant]:
    """Dense products, then each model's experts."""
    for rows in ROWS:
        for name, (columns, depth) in RANK_SHAPES.items():
            yield from dense.product_variants(f"fp8 {name}", columns, depth, rows, quantised=True)
    for model in MODELS:
        yield from expert_variants(model)
