"""The engine: requests join, steps advance them, finished ones leave."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch

from kdtree_engine.cache import CachePool
from kdtree_engine.config import EngineConfig
from kdtree_engine.drafter.base import Drafter
from kdtree_engine.engine.policy import TreePolicy
from kdtree_engine.engine.request import Request, SamplingParams
from kdtree_engine.engine.scheduler import Scheduler
from kdtree_engine.engine.step import StepResult, run_step
from kdtree_engine.errors import CapacityError, OptionError
from kdtree_engine.model import Kimi
from kdtree_engine.sampling import draw_seed

log = logging.getLogger(__name__)

LOW_ACCEPTANCE = 1.2  # tokens per step below which a trained drafter is suspected
WATCHED_STEPS = 64


class Engine:
    """One target, one drafter, one cache, and the requests on them.

    After an exception out of `step` the engine's requests are undefined; user errors are raised by
    `add`, before anything has changed.
    """

    def __init__(
        self,
        target: Kimi,
        drafter: Drafter,
        pool: CachePool,
        config: EngineConfig,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.pool = pool
        self.config = config
        self.policy = TreePolicy(config.tree_nodes, config.chain)
        self.device = target.device
        self.stop_ids = stop_ids
        self.scheduler = Scheduler(pool.layout, config.prefill_chunk, target.device)
        self._ids = itertools.count()
        self._watched_steps = self._watched_tokens = 0
        self._warned = False

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(
        self, tokens: Sequence[int], params: SamplingParams, keep_logits: bool = False
    ) -> Request:
        """Queue a prompt. Raises OptionError or CapacityError for one that cannot be served."""
        config = self.target.config
        tokens = list(tokens)
        if not tokens:
            raise OptionError("the prompt is empty; give at least one token")
        for token in tokens:
            if not 0 <= token < config.vocab_size:
                raise OptionError(
                    f"prompt token {token} is outside the vocabulary (0..{config.vocab_size - 1})"
                )
        for token in params.stop_token_ids or ():
            if not 0 <= token < config.vocab_size:
                raise OptionError(
                    f"stop token {token} is outside the vocabulary (0..{config.vocab_size - 1})"
                )
        room = config.max_positions - len(tokens)
        if room < 0 or (room == 0 and not keep_logits):
            raise CapacityError(
                f"the prompt has {len(tokens)} tokens, but the model's positions end at "
                f"{config.max_positions}; shorten the prompt"
            )
        stops = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else self.stop_ids
        )
        seed = draw_seed() if params.seed is None else params.seed
        most = 0 if keep_logits else min(params.max_tokens, room)
        request = Request(
            next(self._ids), params, seed, tokens, len(tokens), most, stops, keep_logits
        )
        self.scheduler.add(request)
        return request

    @torch.inference_mode()
    def step(self) -> list[StepResult]:
        """Advance every running request; finished ones leave."""
        results = run_step(self)
        for result in results:
            request = result.part.request
            if result.trace is not None and result.trace.tree.nodes:
                self._watch(len(result.trace.path.indices))
            if request.finish_reason is not None or (
                request.keep_logits and not request.is_prefill
            ):
                self.cancel(request)
        return results

    def cancel(self, request: Request) -> None:
        """Take a request out, finished or not."""
        self.scheduler.finish(request)
        self.drafter.reset(request.id)

    def check_integrity(self) -> None:
        """Assert that pages, places and the null page are as they should be."""
        self.scheduler.check_integrity()
        null = self.pool.layout.null_slot
        for layer in self.pool.latents:
            rows = layer.view(-1, layer.shape[-1])
            assert not rows[null : null + layer.shape[1]].any(), "the null page was written"

    def _watch(self, tokens: int) -> None:
        """Warn once when a trained drafter hardly ever guesses right."""
        if not self.drafter.trained or self._warned:
            return
        self._watched_steps += 1
        self._watched_tokens += tokens
        if self._watched_steps < WATCHED_STEPS:
            return
        mean = self._watched_tokens / self._watched_steps
        self._watched_steps = self._watched_tokens = 0
        if mean < LOW_ACCEPTANCE:
            self._warned = True
            log.warning(
                "the drafter gains little: %.2f tokens a step over %d steps; was it trained for "
                "this very revision of the target, and on this kind of text?",
                mean,
                WATCHED_STEPS,
            )
