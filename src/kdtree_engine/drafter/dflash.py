"""The DFlash drafter: a block-diffusion network that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdtree_engine.cache import CachePool
from kdtree_engine.config import PAGE_SIZE
from kdtree_engine.drafter.base import DraftState, Observation
from kdtree_engine.drafter.dflash_model import BlockPositions, DFlashModel, KeysValues
from kdtree_engine.kernels.linear import linear
from kdtree_engine.kernels.top_k import top_log_probs
from kdtree_engine.model import Kimi
from kdtree_engine.sampling import gumbel, seed_word
from kdtree_engine.types import DraftBlock


class DFlashDrafter:
    """Drafts `block_size - 1` positions in one pass.

    Its context keys and values live in the cache pool under the request's page numbers: nothing is
    kept here per request, so a new request starts clean and a shared prefix brings its states
    along.
    """

    name = "dflash"
    trained = True

    def __init__(self, model: DFlashModel, target: Kimi, pool: CachePool) -> None:
        self.model = model
        self.target = target
        self.pool = pool
        self.horizon = model.config.horizon
        self.tap_layers = model.config.tap_layers

    def observe(self, observations: Sequence[Observation]) -> None:
        """Write the context keys and values of committed rows into their pages."""
        taps = torch.cat([item.taps for item in observations if item.taps is not None])
        slots = self._ids([slot for item in observations for slot in item.slots])
        positions = self._ids(
            [item.first + offset for item in observations for offset in range(len(item.slots))]
        )
        for layer, (key, value) in zip(
            self.pool.draft, self.model.context_keys_values(taps, positions), strict=True
        ):
            rows = layer.view(-1, *layer.shape[2:])
            rows.index_copy_(0, slots, torch.stack((key, value), 1).to(layer.dtype))

    def propose(self, states: Sequence[DraftState], candidates: int) -> list[DraftBlock]:
        """One block a request, from the target's head over the masked slots."""
        return [self._block(state, candidates) for state in states]

    def _block(self, state: DraftState, candidates: int) -> DraftBlock:
        config = self.model.config
        size = min(config.block_size, config.max_positions - state.context)
        tokens = self._ids([state.tokens[-1]] + [config.mask_token_id] * (size - 1))
        first = 0 if config.window is None else max(0, state.context - config.window)
        context_positions = torch.arange(first, state.context, device=tokens.device)
        rows = state.context + torch.arange(size, device=tokens.device)
        places = BlockPositions(
            context_positions.unsqueeze(0),
            rows.unsqueeze(0),
            torch.full_like(rows, state.context).unsqueeze(0),
            torch.zeros_like(rows).unsqueeze(0),
        )
        slots = (
            state.pages[context_positions // PAGE_SIZE] * PAGE_SIZE + context_positions % PAGE_SIZE
        )
        x = self.target.embedding.index_select(0, tokens).unsqueeze(0)
        hidden = self.model.hidden(
            x, [self._gather(layer, slots) for layer in self.pool.draft], places
        )
        logits = self._foresee(linear(hidden[0, 1:], self.target.head).float(), state)
        log_probs, ids = top_log_probs(logits, candidates)
        return DraftBlock(ids.cpu(), log_probs.cpu())

    def _foresee(self, logits: Tensor, state: DraftState) -> Tensor:
        """Logits [H, V] with the noise that the target's choice will see, where it draws.

        The token at a position is the largest of logits / T + noise(seed, position), so the
        drafter's best guess of it is found the same way; at T = 0 there is no noise.
        """
        if state.temperature == 0.0:
            return logits
        depths = torch.arange(1, logits.shape[0] + 1, device=logits.device)
        seeds = torch.full_like(depths, seed_word(state.seed))
        noise = gumbel(seeds, state.context + depths, logits.shape[1])
        return logits / state.temperature + noise

    def _gather(self, layer: Tensor, slots: Tensor) -> KeysValues:
        rows = layer.view(-1, *layer.shape[2:]).index_select(0, slots)  # [S, 2, kv_heads, hd]
        return rows[None, :, 0], rows[None, :, 1]

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)

    def reset(self, request: int) -> None:
        """Nothing to forget: all state lies in the request's pages."""
