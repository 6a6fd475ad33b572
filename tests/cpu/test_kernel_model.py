"""A whole target on kernels, in Triton's interpreter, against the same target on references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import CheckpointMaker

from kdtree_engine.checkpoints import open_model
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.kernels.mla_attention import TablePlan
from kdtree_engine.model import Kimi, load_target
from kdtree_engine.model import kimi as kimi_module
from kdtree_engine.types import SpanTable, StepInputs, TargetOutput

CPU = torch.device("cpu")


def run(target: Kimi, tokens: torch.Tensor, context: int) -> tuple[TargetOutput, torch.Tensor]:
    """A causal run after a first one of `context` tokens; its output and the last layer's cache."""
    config = target.config
    shape = (5, 64, config.latent_dim)
    latents = [torch.full(shape, torch.nan) for _ in range(config.num_layers)]
    for layer in latents:
        layer[4] = 0.0
    pages = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    out = TargetOutput(torch.empty(0), None)
    for first, count in ((0, context), (context, len(tokens) - context)):
        if not count:
            continue
        positions = torch.arange(first, first + count)
        slots = pages[0, positions // 64].long() * 64 + positions % 64
        table = SpanTable(torch.tensor([first], dtype=torch.int32), pages)
        rows = torch.arange(count)
        inputs = StepInputs(tokens[first : first + count], positions, slots, table, rows)
        out = target.forward(inputs, latents, (256, 192), (0, config.num_layers - 1))
    return out, latents[-1]


WHOLE = Dims(num_layers=2, hidden_size=128, moe_intermediate_size=128)


@pytest.mark.parametrize(
    ("family", "options"),
    [("k2.6", {}), ("deepseek-v3", {}), ("k2", {}), ("k2", {"dims": WHOLE})],
)
def test_kernels_compute_the_target(
    family: str,
    options: dict[str, Any],
    checkpoint: CheckpointMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder: Path = checkpoint(family, **options)
    tokens = torch.randint(0, 160, (8,), generator=torch.Generator().manual_seed(1))
    wanted, cached = run(load_target(open_model(folder), torch.float32, CPU), tokens, 4)
    target = load_target(open_model(folder), torch.float32, CPU, kernels=True)

    def plan(inputs: StepInputs, null_slot: int) -> TablePlan:
        assert isinstance(inputs.spans, SpanTable)
        return TablePlan(inputs.spans, inputs.slots, len(inputs.tokens))

    monkeypatch.setattr(kimi_module, "plan_attention", plan)
    got, kept = run(target, tokens, 4)
    assert got.logits.shape == wanted.logits.shape
    assert (got.logits - wanted.logits).abs().max() < 2e-5 * wanted.logits.std()
    assert got.taps is not None and wanted.taps is not None
    assert (got.taps - wanted.taps).abs().max() < 2e-5 * wanted.taps.std()
    assert torch.equal(kept.isnan(), cached.isnan())
