"""transformers' `generate` on the packaged weights: same machine, threads, dtype, prompts."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
EXPERTS = ("eager", "grouped_mm", "batched_mm")


class _Clock:
    """A streamer that notes when tokens come: the prompt first, then one a call."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def put(self, value: Any) -> None:
        """Called with the prompt, then with every token."""
        self.calls.append(time.perf_counter())

    def end(self) -> None:
        """Called once at the end."""

    @property
    def decode_seconds(self) -> float:
        """From the first new token, which the prefill gives, to the last."""
        return self.calls[-1] - self.calls[1]


class Peer:
    """transformers' DeepseekV3ForCausalLM in float32 with the packaged target's weights."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(ROOT / "recipes" / "demo"))
        try:
            import export
        finally:
            sys.path.pop(0)
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self.model: Any = export.load(folder)
        self.default = str(self.model.get_experts_implementation()[""])
        self.attention = str(self.model.config._attn_implementation)

    def decode(
        self, prompt: Sequence[int], new_tokens: int, experts: str
    ) -> tuple[list[int], float]:
        """Greedy new tokens, and the seconds for all but the first."""
        if self.model.get_experts_implementation()[""] != experts:
            self.model.set_experts_implementation(experts)
        ids = torch.tensor([list(prompt)])
        clock = _Clock()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            streamer=clock,
        )
        return out[0, len(prompt) :].tolist(), clock.decode_seconds

    def fastest(self, prompt: Sequence[int], new_tokens: int) -> tuple[str, dict[str, float]]:
        """The quickest way to run the experts, and the milliseconds a token of each."""
        found = dict.fromkeys(EXPERTS, float("inf"))
        for _ in range(3):
            for experts in EXPERTS:
                ms = 1e3 * self.decode(prompt, new_tokens, experts)[1] / (new_tokens - 1)
                found[experts] = min(found[experts], round(ms, 3))
        return min(found, key=lambda name: found[name]), found
