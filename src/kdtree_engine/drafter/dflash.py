"""The DFlash drafter: a block-diffusion network that reads the target's hidden states."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kdtree_engine.cache import CachePool
from kdtree_engine.drafter.base import DraftStates
from kdtree_engine.drafter.dflash_model import DFlashModel
from kdtree_engine.kernels.linear import linear
from kdtree_engine.kernels.top_k import top_log_probs
from kdtree_engine.model import Kimi
from kdtree_engine.types import DraftBlocks


class DFlashDrafter:
    """Drafts `horizon` positions in one pass.

    Its context keys and values live in the cache pool under the request's page numbers: nothing is
    kept here per request, so a new request starts clean and a shared prefix brings its states
    along.
    """

    name = "dflash"
    trained = True
    on_device: Literal[True] = True

    def __init__(self, model: DFlashModel, target: Kimi, pool: CachePool) -> None:
        self.model = model
        self.target = target
        self.pool = pool
        self.horizon = model.config.horizon
        self.tap_layers = model.config.tap_layers

    def observe(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write the context keys and values of committed rows into their pages."""
        for layer, (key, value) in zip(
            self.pool.draft, self.model.context_keys_values(taps, positions), strict=True
        ):
            rows = layer.view(-1, *layer.shape[2:])
            rows.index_copy_(0, slots, torch.stack((key, value), 1).to(layer.dtype))

    def propose(self, states: DraftStates, candidates: int) -> DraftBlocks:
        """The head over the guessing slots of one block [root, MASK, ...] a request: the masked
        ones, or all of them where a slot guesses the token after its own.
        """
        config, batch = self.model.config, states.roots.shape[0]
        tokens = states.roots.new_full((batch, config.block_size), config.mask_token_id)
        tokens[:, 0] = states.roots
        steps = torch.arange(config.block_size, device=tokens.device)
        # Behind the last position nothing is accepted: the engine's depth limit ends there.
        positions = (states.contexts[:, None].long() + steps).clamp_(max=config.max_positions - 1)
        own = self.model.embedding
        x = (self.target.embedding if own is None else own).index_select(0, tokens.flatten())
        hidden = self.model.draft_hidden(
            x.view(batch, config.block_size, -1),
            positions,
            self.pool.draft,
            states.contexts,
            states.pages,
        )
        guessing = hidden[:, -config.horizon :].reshape(batch * config.horizon, -1)
        guessed = (states.contexts[:, None].long() + 1 + steps[: config.horizon]).flatten()
        # The target takes the largest of logits / T + noise(seed, position), so the best guess of
        # it is found the same way.
        log_probs, ids = top_log_probs(
            linear(guessing, self.model.head or self.target.head, torch.float32),
            candidates,
            states.temperatures.repeat_interleave(config.horizon),
            states.seeds.repeat_interleave(config.horizon),
            guessed,
            self.model.tokens,
        )
        shape = (batch, config.horizon, -1)
        return DraftBlocks(ids.view(shape), log_probs.view(shape))

    def reset(self, request: int) -> None:
        """Nothing to forget: all state lies in the request's pages."""
