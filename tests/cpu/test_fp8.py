"""FP8 blocks against the formula in words, one element at a time, and against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from golden.model import dequantize_fp8
from kdtree_engine.kernels.fp8 import Fp8Tensor, blocks_of, quantize
from kdtree_engine.kernels.fp8.cases import CASES, inputs

BY_CASE = pytest.mark.parametrize("name", CASES)


def by_hand(weight: Fp8Tensor) -> Tensor:
    """docs/checkpoints.md's formula: float32 [out, in]."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns)
    for r in range(rows):
        for c in range(columns):
            values[r, c] = weight.values[r, c].float() * weight.scales[r // 128, c // 128]
    return values


def test_blocks_count_from_the_first_row_and_the_last_ones_are_partial() -> None:
    assert blocks_of(576, 7168) == (5, 56)
    assert blocks_of(128, 129) == (1, 2)
    weight = quantize(inputs(CASES["partial_edges"]))
    assert weight.scales.shape == (2, 3)
    assert len(set(weight.scales.flatten().tolist())) == 6
    want = by_hand(weight)
    assert torch.equal(weight.dequantize(torch.float32), want)
    assert torch.equal(weight.dequantize(torch.bfloat16), want.to(torch.bfloat16))
    assert not torch.equal(weight.dequantize(torch.bfloat16).float(), want)


@BY_CASE
def test_the_golden_model_agrees_in_bfloat16(name: str) -> None:
    weight = quantize(inputs(CASES[name]))
    want = dequantize_fp8(weight.values.float().numpy(), weight.scales.numpy())
    assert torch.equal(weight.dequantize(torch.bfloat16).double(), torch.from_numpy(want))


@BY_CASE
def test_quantize_is_within_half_a_step(name: str) -> None:
    weight = inputs(CASES[name])
    quantized = quantize(weight)
    assert quantized.values.dtype == torch.float8_e4m3fn
    assert quantized.values.float().isfinite().all()
    error = (quantized.dequantize(torch.float32) - weight).abs()
    # Three bits of mantissa: half a step is 1/16 of the value; below 2^-6 steps stay 2^-9 wide.
    by_row = quantized.scales.repeat_interleave(128, 0)[: weight.shape[0]]
    scale = by_row.repeat_interleave(128, 1)[:, : weight.shape[1]]
    assert (error <= torch.maximum(weight.abs() / 16, scale * 2.0**-10) * 1.0001).all()


def test_a_block_of_zeros() -> None:
    weight = torch.zeros(130, 130)
    weight[129, 129] = 3.0
    quantized = quantize(weight)
    assert quantized.scales.tolist() == [[1.0, 1.0], [1.0, pytest.approx(3 / 448)]]
    assert torch.equal(quantized.dequantize(torch.float32) != 0, weight != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_dequantises_to_the_models_dtype(dtype: torch.dtype) -> None:
    """Its operation on whole blocks: it takes the block's size from the number of scales."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = quantize(inputs(CASES["one_block"]._replace(rows=256, columns=384)))
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(*weight, output_dtype=dtype)
    assert torch.equal(weight.dequantize(dtype), theirs)
