"""INT4 packing against the formula in words, and against compressed-tensors bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels.int4 import Int4Tensor, dequantise, pack, quantise, unpack
from kdtree_engine.kernels.int4.cases import CASES, inputs


def integers(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-8, 8, (rows, columns), generator=generator)
    q[0, :8] = torch.tensor([7, -8, 0, 1, -1, 2, -2, 7])  # the top nibble 15: a negative word
    q[-1, -8:] = -8
    return q


def library() -> Any:
    pytest.importorskip("compressed_tensors", reason="the oracle needs compressed-tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def test_words_are_little_endian_nibbles() -> None:
    q = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7]])
    # u = q + 8 = 0, 1, 2, .., 6, 15 from the lowest nibble up
    assert pack(q).tolist() == [[0xF6543210 - (1 << 32)]]
    assert pack(q).view(torch.uint8).tolist() == [[0x10, 0x32, 0x54, 0xF6]]


@pytest.mark.parametrize("shape", [(2, 8), (3, 32), (7, 96), (5, 1024)])
def test_unpack_undoes_pack(shape: tuple[int, int]) -> None:
    q = integers(*shape)
    packed = pack(q)
    assert packed.dtype == torch.int32
    assert packed.shape == (shape[0], shape[1] // 8)
    assert (packed < 0).any()
    assert torch.equal(unpack(packed), q.to(torch.int8))


def test_dequantise_rounds_the_product_once() -> None:
    """One element at a time, as docs/checkpoints.md writes it; the rounding must matter."""
    q, scale = integers(4, 64), torch.tensor([[0.0123, 0.31], [1e-3, 7.7], [3e-5, 1.0], [2.5, 9.0]])
    weight = Int4Tensor(pack(q), scale.to(torch.bfloat16))
    got, exact = dequantise(weight), torch.empty(4, 64, dtype=torch.float64)
    for row in range(4):
        for column in range(64):
            word = int(weight.packed[row, column >> 3]) % (1 << 32)
            u = word >> (4 * (column & 7)) & 0xF
            exact[row, column] = (u - 8) * float(weight.scale[row, column >> 5])
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.to(torch.bfloat16))
    assert not torch.equal(got.double(), exact)


@pytest.mark.parametrize("name", CASES)
def test_quantise_is_within_half_a_step(name: str) -> None:
    weight = inputs(CASES[name])
    packed = quantise(weight)
    assert packed.shape == weight.shape
    step = packed.scale.double().repeat_interleave(32, dim=1)
    value = unpack(packed.packed).double() * step
    # Half a step, and half a step more where the largest of a group is cut at 7; bf16 scales.
    assert ((value - weight.double()).abs() <= step * 0.55).all()
    assert (unpack(packed.packed)[0, :32] == 0).all() or CASES[name].rows == 1


@pytest.mark.parametrize("name", CASES)
def test_against_compressed_tensors(name: str) -> None:
    scheme = library()
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor as Packer
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = inputs(CASES[name])
    groups = weight.reshape(weight.shape[0], -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    ours = quantise(weight)
    used = groups.abs().amax(-1) > 0  # for a group of zeros each picks some scale of its own
    assert torch.equal(scale.to(torch.bfloat16)[used], ours.scale[used])
    # Their weights may be float32 here, and then their quotients are ours.
    state = {"weight": weight, "weight_scale": ours.scale.float()}
    theirs = Packer.compress(state, scheme)
    assert torch.equal(theirs["weight_packed"], ours.packed)
    stored = dict(theirs, weight_scale=ours.scale)
    opened = Packer.decompress(stored, scheme)["weight"]
    assert opened.dtype == torch.bfloat16
    assert torch.equal(opened, dequantise(ours))
