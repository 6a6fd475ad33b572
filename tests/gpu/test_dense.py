"""Dense kernels on the device: near the reference, and the same bits for every number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels import linear, rms_norm, swiglu
from kdtree_engine.kernels.absorb import absorb
from kdtree_engine.kernels.absorb import reference as absorb_reference
from kdtree_engine.kernels.add_norm import add_norm
from kdtree_engine.kernels.add_norm import reference as add_norm_reference
from kdtree_engine.kernels.latent_rows import write_latents
from kdtree_engine.kernels.linear import Tiles, pack_linear
from kdtree_engine.kernels.rope import Angles
from kdtree_engine.kernels.value_up import value_up

pytestmark = pytest.mark.gpu

CUDA = "cuda"
EPS = 1e-5
ROWS = 300


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).to(dtype)


def near(got: Tensor, wanted: Tensor, most: float) -> None:
    error = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
    assert error < most, error


@pytest.mark.parametrize(
    ("columns", "depth"), [(2112, 7168), (1536, 1536), (896, 7168), (130, 96), (3072, 256)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_products(columns: int, depth: int, dtype: torch.dtype) -> None:
    packed = pack_linear(normal(columns, depth, scale=depth**-0.5), dtype, CUDA)
    x = normal(ROWS, depth, dtype=dtype)
    full = linear.linear(x, packed, torch.float32)
    near(full, x.double() @ packed.matrix().double().T, 2e-6 if dtype == torch.float32 else 1e-5)
    for rows in (1, 2, 7, 8, 16, 33, 64, 65, 128, 257):
        assert torch.equal(linear.linear(x[:rows], packed, torch.float32), full[:rows]), rows
    for block_n, block_t, block_k, warps in ((64, 8, 64, 1), (64, 32, 64, 2), (64, 64, 64, 8)):
        for split in (False, True):
            tiles = Tiles(block_n, block_t, block_k, warps, 3, split)
            parts = linear._launch_parts(x, packed, tiles)
            assert torch.equal(linear.add_parts(parts, columns, torch.float32), full), tiles


@pytest.mark.parametrize("width", [64, 256, 7168])
def test_norms(width: int) -> None:
    x, weight, y = normal(ROWS, width), normal(width), normal(ROWS, width)
    got = rms_norm.rms_norm(x, weight, EPS)
    near(got, rms_norm.reference.rms_norm(x, weight, EPS), 3e-3)
    parts = normal(3, ROWS, width + 5, dtype=torch.float32)
    total = parts.sum(0)[:, :width]
    both = add_norm(parts, x, weight, EPS)
    wanted = add_norm_reference.add_norm(total, x.float(), weight, EPS)
    for one, other in zip(both, wanted, strict=True):
        near(one, other, 5e-3)
    assert torch.isfinite(add_norm(y, x, weight, EPS)[1]).all()
    for rows in (1, 64):
        some = add_norm(parts[:, :rows].contiguous(), x[:rows].contiguous(), weight, EPS)
        assert torch.equal(some[1], both[1][:rows]) and torch.equal(some[0], both[0][:rows])
        assert torch.equal(rms_norm.rms_norm(x[:rows], weight, EPS), got[:rows])


def test_swiglu() -> None:
    parts = normal(2, ROWS, 520, dtype=torch.float32)
    got = swiglu.swiglu_sum(parts, 256, torch.bfloat16)
    near(got, swiglu.reference.swiglu(parts.sum(0)[:, :512]), 3e-3)
    assert torch.equal(swiglu.swiglu_sum(parts[:, :1].contiguous(), 256, torch.bfloat16), got[:1])


@pytest.mark.parametrize(("heads", "nope", "rope", "latent", "query"), [
    (8, 128, 64, 512, 1536), (4, 32, 32, 64, 96)
])  # fmt: skip
def test_attention_inputs(heads: int, nope: int, rope: int, latent: int, query: int) -> None:
    down = normal(2, ROWS, query + latent + rope + 3, dtype=torch.float32)
    weights = normal(query), normal(latent)
    angles = Angles(normal(ROWS, 1, rope, dtype=torch.float32), normal(ROWS, 1, rope).float())
    slots = torch.randperm(64 * 8, device=CUDA)[:ROWS]
    caches = [torch.full((8, 64, latent + rope), torch.nan, device=CUDA).bfloat16() for _ in "ab"]
    got = write_latents(down, *weights, EPS, angles, slots, caches[0], query)
    total = down.sum(0)[:, : query + latent + rope]
    wanted = write_latents(total, *weights, EPS, angles, slots, caches[1], query)
    near(got, wanted, 5e-3)
    rows = [cache.view(512, -1)[slots] for cache in caches]
    near(rows[0], rows[1], 5e-3)
    one = caches[0].clone()
    own = Angles(angles.cos[5:6], angles.sin[5:6])
    alone = write_latents(down[:, 5:6].contiguous(), *weights, EPS, own, slots[5:6], one, query)
    assert torch.equal(alone[0], got[5]) and torch.equal(one.view(512, -1)[slots[5]], rows[0][5])

    key_up = normal(heads, latent, nope, scale=nope**-0.5).transpose(1, 2)
    parts = normal(3, ROWS, heads * (nope + rope), dtype=torch.float32)
    absorbed = absorb(parts, key_up, angles)
    near(absorbed, absorb_reference.absorb(parts.sum(0), key_up.float(), angles), 5e-3)
    value = normal(heads, nope, latent, scale=latent**-0.5).transpose(1, 2)
    mixed = absorbed[..., :latent]
    out = value_up(mixed, value)
    near(
        out.view(ROWS, heads, -1), torch.einsum("rhc,hcv->rhv", mixed.float(), value.float()), 5e-3
    )
    for count in (1, 64):
        cut = Angles(angles.cos[:count], angles.sin[:count])
        assert torch.equal(absorb(parts[:, :count].contiguous(), key_up, cut), absorbed[:count])
        assert torch.equal(value_up(mixed[:count], value), out[:count])
