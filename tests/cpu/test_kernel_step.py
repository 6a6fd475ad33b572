"""The whole engine on kernels, in Triton's interpreter: drafts, trees, forward, draws and commits
of captured steps, against the same engine on references.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import CheckpointMaker
from e2e import pretend
from torch.utils._python_dispatch import TorchDispatchMode

from kdtree_engine import SamplingParams
from kdtree_engine.cache import CacheLayout, allocate_pool
from kdtree_engine.checkpoints import open_drafter, open_model
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.config import EngineConfig
from kdtree_engine.drafter.dflash import DFlashDrafter
from kdtree_engine.drafter.load import build_drafter, drafter_tensors, load_drafter
from kdtree_engine.engine.loop import Engine
from kdtree_engine.engine.request import Request
from kdtree_engine.engine.step import StepOutput
from kdtree_engine.model import load_target

CPU = torch.device("cpu")
PROMPT = [5, 9, 5, 9, 5]


HOST_READS = {
    "aten._local_scalar_dense.default",
    "aten.item.default",
    "aten.is_nonzero.default",
    "aten.repeat_interleave.self_Tensor",
    "aten.where.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.equal.default",
}
HOST_WRITES = {"aten.lift_fresh.default"}  # torch.tensor(...): a copy from the host


class Unwatched(TorchDispatchMode):
    """A step as a capture takes it: no operator waits for a value or copies one from the host."""

    def __init__(self, warm: bool) -> None:
        super().__init__()
        self.forbidden = HOST_READS | HOST_WRITES if warm else HOST_READS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert str(func) not in self.forbidden, f"{func} in a captured step"
        return func(*args, **(kwargs or {}))


def watched(patch: pytest.MonkeyPatch) -> list[int]:
    """Steps run under `Unwatched`; the first of all may still set things up."""
    rows: list[int] = []
    original, tolist = pretend.decode_step, torch.Tensor.tolist

    def refused(x: torch.Tensor) -> Any:
        raise AssertionError(f"a tensor {list(x.shape)} read as a list in a captured step")

    def step(*args: Any) -> StepOutput:
        with Unwatched(warm=bool(rows)):
            torch.Tensor.tolist = refused  # type: ignore[method-assign, assignment]
            try:
                out = original(*args)
            finally:
                torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        rows.append(args[2])
        return out

    patch.setattr(pretend, "decode_step", step)
    return rows


def engine_of(folder: Path, kernels: bool) -> Engine:
    """Three nodes; every page but the one of zeros holds NaN."""
    target = load_target(open_model(folder), torch.float32, CPU, kernels=kernels)
    network = load_drafter(open_drafter(folder / "drafter"), torch.float32, CPU)
    network = build_drafter(
        network.config, drafter_tensors(network), torch.float32, CPU, kernels, network.tokens
    )
    config, draft = target.config, network.config
    layout = CacheLayout(3, 3)
    pool = allocate_pool(
        layout,
        config.num_layers,
        config.latent_dim,
        torch.float32,
        CPU,
        draft.num_layers,
        (draft.num_kv_heads, draft.head_dim),
    )
    for layer in (*pool.latents, *pool.draft):
        layer.fill_(torch.nan)
        layer[layout.null_slot // 64] = 0.0
    drafter = DFlashDrafter(network, target, pool)
    return Engine(target, drafter, pool, EngineConfig(3, max_requests=3))


def run(engine: Engine) -> Request:
    params = SamplingParams(3, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
    request = engine.add(PROMPT, params)
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    return request


def test_kernels_and_a_dummy_decode_the_same(
    checkpoint: CheckpointMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request in steps for two, the next step launched before the last is read."""
    folder = checkpoint(
        "k2.6", drafter=True, dims=Dims(num_layers=2, taps=(0,), drafter_layers=1, block_size=3)
    )
    wanted = run(engine_of(folder, kernels=False))
    engine = engine_of(folder, kernels=True)
    engine.runner = pretend.Pretend(engine, 3, eager=False)
    engine.runner.captures = engine.lookahead = True
    monkeypatch.setattr(engine.runner, "bucket", lambda requests, rows: (2, 4 if rows > 1 else 1))
    for name, module in list(sys.modules.items()):
        if name.startswith("kdtree_engine.") and hasattr(module, "has_kernel"):
            monkeypatch.setattr(module, "has_kernel", lambda x: True)
    steps = watched(monkeypatch)
    got = run(engine)
    assert 4 in steps
    assert got.error is None
    assert got.output_ids == wanted.output_ids
    assert got.stats.accepted == wanted.stats.accepted
    assert got.stats.nodes == wanted.stats.nodes
