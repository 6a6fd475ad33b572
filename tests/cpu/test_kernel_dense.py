"""The dense part of the network as kernels, in Triton's interpreter, against the references.

The interpreter's products round as NumPy's do, by shape, so equality of bits across tilings is
asserted on whole numbers here, whose sums are exact, and on real ones in tests/gpu.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_engine.config import RopeConfig
from kdtree_engine.kernels import absorb, add_norm, latent_rows, linear, rms_norm, swiglu, value_up
from kdtree_engine.kernels.absorb.cases import CASES as ABSORB
from kdtree_engine.kernels.add_norm.cases import CASES as ADD_NORM
from kdtree_engine.kernels.latent_rows.cases import CASES as LATENT_ROWS
from kdtree_engine.kernels.linear import Tiles, pack_linear
from kdtree_engine.kernels.linear.packed import segment_blocks
from kdtree_engine.kernels.rope import Angles, rope_table
from kdtree_engine.kernels.value_up.cases import CASES as VALUE_UP

CPU = torch.device("cpu")
EPS = 1e-6


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Whole numbers, exact in every order of summation."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def close(got: Tensor, wanted: Tensor) -> None:
    error = ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()
    assert error < 2e-6, error


def as_parts(total: Tensor, parts: int, spare: int = 0) -> Tensor:
    """Random parts of the sum `total` [R, N], with `spare` columns of NaN behind."""
    pieces = normal(parts - 1, *total.shape, seed=9)
    last = total - pieces.sum(0)
    stacked = torch.cat((pieces, last.unsqueeze(0)))
    behind = torch.full((*stacked.shape[:2], spare), torch.nan)
    return torch.cat((stacked, behind), 2).contiguous()


@pytest.mark.parametrize(("columns", "depth"), [(130, 256), (64, 64), (200, 712), (70, 1024)])
def test_product_is_exact_under_every_tiling(columns: int, depth: int) -> None:
    weight = whole(columns, depth)
    packed = pack_linear(weight, torch.float32, CPU)
    assert packed.segments > 1 or depth < 512
    x = whole(9, depth, seed=1)
    base = linear._launch_parts(x, packed, Tiles(64, 8, 64, 4, 1, True))
    assert base.shape == (packed.segments, 9, packed.width)
    total = linear.add_parts(base, columns, torch.float32)
    assert torch.equal(total, x @ weight.T)
    one = linear._launch_parts(x[3:4], packed, Tiles(64, 8, 64, 4, 1, True))
    assert torch.equal(one[:, 0], base[:, 3])
    serial = linear._launch_parts(x, packed, Tiles(64, 16, 64, 4, 1, False))
    assert torch.equal(linear.add_parts(serial, columns, torch.float32), total)


def test_segments_depend_on_the_shape_alone() -> None:
    for tiles, blocks in [(33, 112), (24, 24), (112, 16), (320, 112), (14, 112), (4, 4), (1, 3)]:
        length = segment_blocks(tiles, blocks)
        count = -(-blocks // length)
        assert 1 <= length <= blocks
        assert count * tiles <= 132 or count == 1
        assert blocks % 2 or length % 2 == 0


def test_half_precision_takes_two_blocks_at_a_time() -> None:
    weight = whole(64, 512).half()
    packed = pack_linear(weight, torch.float16, CPU)
    x = whole(3, 512, seed=1).half()
    narrow = linear._launch_parts(x, packed, Tiles(64, 8, 64, 4, 1, True))
    wide = linear._launch_parts(x, packed, Tiles(64, 8, 128, 4, 1, True))
    total = linear.add_parts(wide, 64, torch.float32)
    assert torch.equal(total, x.float() @ weight.float().T)
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("width", [33, 64, 300])
def test_rms_norm(width: int) -> None:
    x, weight = normal(5, width), normal(width, seed=1)
    close(rms_norm._launch(x, weight, EPS), rms_norm.rms_norm(x, weight, EPS))
    strided = normal(5, width + 7)[:, :width]
    close(rms_norm._launch(strided, weight, EPS), rms_norm.rms_norm(strided, weight, EPS))


def test_swiglu_of_parts() -> None:
    total = normal(3, 66)
    parts = as_parts(total, 3, spare=5)
    close(swiglu._launch(parts, 33, torch.float32), swiglu.swiglu(total))


@pytest.mark.parametrize("case", ADD_NORM[:2], ids=lambda case: case.name)
def test_add_norm(case: object) -> None:
    rows, width, count = case.rows, case.width, case.parts  # type: ignore[attr-defined]
    y, residual, weight = normal(rows, width), normal(rows, width, seed=1), normal(width, seed=2)
    got = add_norm._launch(as_parts(y, count, 3), residual, weight, EPS)
    wanted = add_norm.add_norm(y, residual, weight, EPS)
    for one, other in zip(got, wanted, strict=True):
        close(one, other)


def angles_of(rows: int, rope: int) -> Angles:
    config = RopeConfig(50000.0, "yarn", 8.0, 256, 32.0, 1.0, 1.0, 1.0)
    table = rope_table(config, rope, 400, CPU, interleaved=True)
    return table.at(torch.arange(rows) * 37 % 400).over_heads()


@pytest.mark.parametrize("case", LATENT_ROWS[:2], ids=lambda case: case.name)
def test_latent_rows(case: object) -> None:
    rows, query, latent, rope = case.rows, case.query, case.latent, case.rope  # type: ignore[attr-defined]
    down = normal(rows, query + latent + rope)
    query_weight = None if case.plain else normal(query, seed=1)  # type: ignore[attr-defined]
    latent_weight, angles = normal(latent, seed=2), angles_of(rows, rope)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(3))[:rows]
    caches = [torch.full((2, 64, latent + rope), torch.nan) for _ in range(2)]
    parts = as_parts(down, case.parts, 4)  # type: ignore[attr-defined]
    settings = (query_weight, latent_weight, EPS, angles, slots)
    got = latent_rows.write_latents(parts, *settings, caches[0], query)
    wanted = latent_rows.write_latents(down, *settings, caches[1], query)
    if query_weight is None:
        assert got is parts
    else:
        close(got, wanted)
    flat = [cache.view(128, -1) for cache in caches]
    close(flat[0][slots], flat[1][slots])
    assert torch.equal(flat[0].isnan(), flat[1].isnan())


@pytest.mark.parametrize("case", ABSORB[:2], ids=lambda case: case.name)
def test_absorb(case: object) -> None:
    rows, heads, nope, rope = case.rows, case.heads, case.nope, case.rope  # type: ignore[attr-defined]
    query = normal(rows, heads * (nope + rope))
    key_up = normal(heads, nope, case.latent, seed=1)  # type: ignore[attr-defined]
    stored = key_up.transpose(1, 2).contiguous().transpose(1, 2)
    angles = angles_of(rows, rope)
    parts = as_parts(query, case.parts, 6)  # type: ignore[attr-defined]
    got = absorb.absorb(parts, stored, angles)
    close(got, absorb.absorb(query, key_up, angles))
    own = Angles(angles.cos[2:3].contiguous(), angles.sin[2:3].contiguous())
    close(absorb.absorb(parts[:, 2:3].contiguous(), stored, own)[0], got[2])


@pytest.mark.parametrize("case", VALUE_UP[:2], ids=lambda case: case.name)
def test_value_up(case: object) -> None:
    heads, latent, value = case.heads, case.latent, case.value  # type: ignore[attr-defined]
    mixed, weight = normal(case.rows, heads, latent), normal(heads, latent, value, seed=1)  # type: ignore[attr-defined]
    stored = weight.transpose(1, 2).contiguous().transpose(1, 2)
    got = value_up._launch(mixed, stored)
    close(got, value_up.value_up(mixed, weight))
    close(value_up._launch(mixed[1:2], stored)[0], got[1])
