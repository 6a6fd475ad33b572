"""The frozen target as a teacher: hidden states of whole sequences, by the inference forward."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.cache import CacheLayout, allocate_pool, pages_for
from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.model import Kimi
from kdtree_engine.types import Span, StepInputs

KEPT = torch.bfloat16
"""Hidden states are kept for many passes, so in half the memory."""


class Teacher:
    """Runs batches of `batch` sequences of `length` tokens through the target as causal runs."""

    def __init__(self, target: Kimi, batch: int, length: int, tap_layers: tuple[int, ...]) -> None:
        config, device = target.config, target.device
        self.target, self.batch, self.length, self.tap_layers = target, batch, length, tap_layers
        pages = pages_for(length)
        self.pool = allocate_pool(
            CacheLayout(batch * pages, 1),
            config.num_layers,
            config.latent_dim,
            target.embedding.dtype,
            device,
        )
        self.spans = tuple(
            Span(i * length, length, 0, torch.arange(i * pages, (i + 1) * pages, device=device))
            for i in range(batch)
        )
        starts = torch.arange(batch, device=device).unsqueeze(1) * pages * PAGE_SIZE
        offsets = torch.arange(length, device=device)
        self.slots = (starts + offsets).flatten()
        self.positions = offsets.repeat(batch)

    @property
    def bytes_per_sequence(self) -> int:
        """Memory of what `run` returns for one sequence."""
        kept = (len(self.tap_layers) + 1) * self.target.config.hidden_size
        return self.length * (kept * KEPT.itemsize + 8)

    @torch.no_grad()
    def run(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For tokens [batch, length]: tokens, taps [.., n * H] and last hidden [.., H] in KEPT."""
        layout, last = self.pool.layout, self.target.config.num_layers - 1
        none = self.slots[:0]
        inputs = StepInputs(tokens.flatten(), self.positions, self.slots, self.spans, none)
        reserved = (layout.null_slot, layout.spill_slot)
        out = self.target.forward(inputs, self.pool.latents, reserved, (*self.tap_layers, last))
        assert out.taps is not None
        kept = out.taps.to(KEPT).view(self.batch, self.length, -1)
        width = self.target.config.hidden_size
        return tokens, kept[..., :-width], kept[..., -width:]
