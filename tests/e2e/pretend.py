"""Captured steps where nothing can be captured: the engine's runner as on a GPU, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kdtree_engine.engine import graphs
from kdtree_engine.engine.graphs import Runner
from kdtree_engine.engine.step import StepOutput, Stopwatch, decode_step
from kdtree_engine.types import DraftBlocks


class Pretend(Runner):
    """Captures on a CPU: a "graph" does the step again on the tensors it was made with, and leaves
    its results in the same memory.
    """

    def _replay(self, *given: Any) -> StepOutput:
        out = super()._replay(*given)
        # On a GPU the record is copied to the host in the stream's order; here it is at once.
        return StepOutput(out.record.clone(), out.logits)

    def _capture(self, key: Any, like: DraftBlocks | None) -> Any:
        count, rows, _, options = key
        places = torch.full((count,), self._parts.state.dummy)
        blocks = None if like is None else DraftBlocks(like.tokens.clone(), like.log_probs.clone())

        def step() -> StepOutput:
            return decode_step(self._parts, places, rows, blocks, Stopwatch(), options)

        out = step()

        def replay() -> None:
            again = step()
            out.record.copy_(again.record)
            out.logits.copy_(again.logits)

        return graphs._Captured(SimpleNamespace(replay=replay), places, blocks, out)  # type: ignore[arg-type]
