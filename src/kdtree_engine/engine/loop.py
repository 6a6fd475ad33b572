"""The engine: requests join, steps advance them, finished ones leave."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from kdtree_engine.cache import CachePool, pages_for
from kdtree_engine.config import EngineConfig
from kdtree_engine.drafter.base import Drafter, DraftState, HostDrafter, stack_blocks
from kdtree_engine.engine.edits import edits_of
from kdtree_engine.engine.graphs import MOST_FLIGHTS, Runner
from kdtree_engine.engine.policy import TreePolicy
from kdtree_engine.engine.prefill import prefill
from kdtree_engine.engine.record import Record, told
from kdtree_engine.engine.request import Request, StepResult, StepTrace, TokenLogProb, no_choice
from kdtree_engine.engine.sampling_params import SamplingParams
from kdtree_engine.engine.scheduler import Scheduler
from kdtree_engine.engine.state import DecodeState
from kdtree_engine.engine.step import StepOptions, path_length
from kdtree_engine.errors import CapacityError, OptionError, shown
from kdtree_engine.model import Kimi
from kdtree_engine.sampling import draw_seed
from kdtree_engine.tokenizer import Tokenizer
from kdtree_engine.tokenizer.stops import StopStream
from kdtree_engine.types import AcceptedPath, DraftBlocks

log = logging.getLogger(__name__)

LOW_ACCEPTANCE = 1.2  # tokens per step below which a trained drafter is suspected
WATCHED_STEPS = 64


class Engine:
    """One target, one drafter, one cache, and the requests on them.

    An exception out of `step` ends the requests that were running with an error; those that wait go
    on. User errors are raised by `add`, before anything has changed.
    """

    def __init__(
        self,
        target: Kimi,
        drafter: Drafter,
        pool: CachePool,
        config: EngineConfig,
        stop_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.pool = pool
        self.config = config
        self.policy = TreePolicy(config.tree_nodes, config.chain)
        self.device = target.device
        self.stop_ids = stop_ids
        self.tokenizer = tokenizer
        self.state = DecodeState(
            pool.layout, target.config.max_positions, target.config.vocab_size, target.device
        )
        self.scheduler = Scheduler(pool.layout, config.prefill_chunk, self.state)
        self.runner = Runner(self, pool.layout.requests, config.eager)
        self.lookahead = target.device.type == "cuda"  # a CPU would do no two steps at once
        self._ids = itertools.count()
        self._watched_steps = self._watched_tokens = 0
        self._warned = False

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        keep_logits: bool = False,
        sample: int = 0,
        after: Request | None = None,
    ) -> Request:
        """Queue a prompt. Raises OptionError or CapacityError for one that cannot be served.

        sample: its number among those of one prompt. after: the first of them, which computes it;
        then this one waits until that is done, or that one has left.
        """
        config = self.target.config
        tokens = list(tokens)
        if not tokens:
            raise OptionError("the prompt is empty; give at least one token")
        _check_tokens("prompt token", tokens, config.vocab_size)
        _check_tokens("stop token", params.stop_token_ids or (), config.vocab_size)
        edits = edits_of(params, self.tokenizer, config.vocab_size)
        text = self._stop_texts(params)
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
            next(self._ids),
            params,
            seed,
            tokens,
            len(tokens),
            most,
            stops,
            keep_logits,
            sample=sample,
            after=after,
            edits=edits,
            text=text,
        )
        self.scheduler.add(request)
        return request

    def _stop_texts(self, params: SamplingParams) -> StopStream | None:
        if not params.stop:
            return None
        if self.tokenizer is None:
            raise OptionError("stop was given, but the model has no tokenizer: use stop_token_ids")
        return StopStream(self.tokenizer.stream(), params.stop, params.min_tokens)

    @torch.inference_mode()
    def step(self) -> list[StepResult]:
        """Advance every running request; finished ones leave.

        On CUDA a decode step is launched before the one before it is read, unless the drafter works
        on the host; so what it did is among the results of the next call. Raises CapacityError when
        the device has no memory left: the requests that were running end, waiting ones go on.
        """
        results: list[StepResult] = []
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                self._step(results)
            return results
        except torch.OutOfMemoryError as error:
            self._abandon(results)
            raise CapacityError(
                f"{self.device} ran out of memory in a step: {str(error).splitlines()[0]} Lower "
                "prefill_chunk, max_requests, tree_nodes or cache_pages"
            ) from error
        except BaseException:
            self._abandon(results)
            raise

    def _step(self, results: list[StepResult]) -> None:
        self._make_room(results)
        running = self.scheduler.schedule(MOST_FLIGHTS * self._stride)
        prompts = [request for request in running if request.is_prefill]
        launched = self._launch([request for request in running if not request.is_prefill])
        while self.runner.in_flight > (launched and self._ahead):
            self._land(results)
        self._prepare([one for one in running if not one.is_prefill], prompts)
        for request in prompts:
            result = prefill(self, request, self.scheduler.chunk(request))
            # Results may wait for their reader: they must not hold a prompt's logits meanwhile.
            results.append(result if self.runner.keep_logits else replace(result, logits=None))
            self._settle(request)

    def _make_room(self, results: list[StepResult]) -> None:
        """Give every request pages for all that the steps under way and the one to come may commit,
        in the order of their admission. Where pages run out, what is under way is read first: it
        may end requests, and a preempted one keeps its tokens.
        """
        for request in list(self.scheduler.running):
            while self._is_due(request):
                steps = 1 + self.runner.flights_of(request)
                if self.scheduler.grow(request, request.context + steps * self._stride):
                    break
                if self.runner.in_flight:
                    self._land(results)
                else:
                    self.scheduler.preempt()

    @property
    def _stride(self) -> int:
        """Tokens that a step may commit for one request."""
        return path_length(self.drafter, self.policy.most_rows(self.drafter.horizon))

    def _is_due(self, request: Request) -> bool:
        """Whether a request decodes and may have a token left to emit after the steps under way."""
        decoding = request.place >= 0 and not request.is_prefill
        return decoding and request.remaining > self.runner.flights_of(request)

    def _settle(self, request: Request) -> None:
        """Publish what a request has got; it leaves if it has ended."""
        self.scheduler.publish(request)
        if request.finish_reason is not None or (request.keep_logits and not request.is_prefill):
            self.cancel(request)

    def _abandon(self, results: list[StepResult]) -> None:
        """What a step did is lost, so nobody knows where the device stands: no request that it may
        have moved can go on; nor one whose result is lost, though it may wait again.
        """
        self.runner.drop()
        lost = [result.request for result in results]
        for request in dict.fromkeys([*self.scheduler.abandon(), *lost]):
            if request.finish_reason is None:
                request.fail("the step that it was in was interrupted")
            self.cancel(request)

    @property
    def _ahead(self) -> bool:
        """Whether the next step can start before the host knows what this one did."""
        return self.lookahead and (self.drafter.on_device or not self._drafts)

    @property
    def _drafts(self) -> bool:
        return self.policy.nodes > 0 and self.drafter.horizon > 0

    def _prepare(self, decoding: list[Request], prompts: list[Request]) -> None:
        """Capture what requests will decode with before their prefills end."""
        ending = [
            one
            for one in prompts
            if one.remaining > one.is_rootless
            and one.context + self.scheduler.chunk(one) == one.fill
        ]
        if not ending or not self.runner.captures:
            return
        count, options = len(decoding) + len(ending), _options([*decoding, *ending])
        if self._drafts and self.drafter.on_device:
            self.runner.prepare(count, self._device_rows(self.drafter.horizon), None, options)
            return
        self.runner.prepare(count, 1, None, options)
        if self._drafts:
            rows = self.policy.most_rows(self.drafter.horizon)
            places, _ = self.runner.bucket(count, rows)
            blocks = stack_blocks([], places, self.drafter.horizon, self.policy.nodes)
            self.runner.prepare(count, rows, blocks, options)

    def _device_rows(self, reach: int) -> int:
        """Rows of a tree whose drafter works on the device and proposes `reach` depths."""
        vocab = self.target.config.vocab_size
        return 1 + self.policy.size([min(self.policy.nodes, vocab)] * reach)

    def _launch(self, decoding: list[Request]) -> bool:
        """Start a decode step of those that may have a token left to emit; whether there is one."""
        due = [one for one in decoding if self._is_due(one)]
        if not due:
            return False
        blocks, rows = None, 1
        reach = max(min(self.drafter.horizon, request.remaining - 1) for request in due)
        if self.runner.captures and self.drafter.on_device:
            reach = self.drafter.horizon  # one graph will do: the device knows each one's limit
        if self._drafts and reach > 0:
            if self.drafter.on_device:
                rows = self._device_rows(reach)
            else:
                blocks, rows = self._host_blocks(self.drafter, due)
        self.runner.launch(due, rows, blocks, _options(due))
        return True

    def _host_blocks(
        self, drafter: HostDrafter, due: list[Request]
    ) -> tuple[DraftBlocks | None, int]:
        """What a host drafter proposes, and the rows of the largest tree over it."""
        states = [DraftState(request.id, request.tokens) for request in due]
        blocks = drafter.propose(states, self.policy.nodes)
        nodes = 0
        for block, request in zip(blocks, due, strict=True):
            usable = block.log_probs[: request.remaining - 1].isfinite().sum(1)
            nodes = max(nodes, self.policy.size(usable.tolist()))
        if not nodes:
            return None, 1
        if not self.runner.captures:
            return stack_blocks(blocks), nodes + 1
        places, rows = self.runner.bucket(len(due), nodes + 1)
        return stack_blocks(blocks, places, drafter.horizon, self.policy.nodes), rows

    def _land(self, results: list[StepResult]) -> None:
        """Read the oldest step under way. Requests that have left meanwhile are passed over: a stop
        token of the step before ended them, or the caller did.
        """
        landing = self.runner.collect()
        for index, (request, record) in enumerate(
            zip(landing.requests, landing.records, strict=True)
        ):
            if request.place < 0 or request.finish_reason is not None:
                continue
            logits = landing.logits
            if logits is not None:
                logits = logits[index * landing.rows : (index + 1) * landing.rows]
            results.append(_emit(request, record, logits))
            request.stats.add_seconds(landing.seconds)
            trace = results[-1].trace
            if trace is not None and trace.tree.nodes:
                self._watch(len(trace.path.indices))
            self._settle(request)

    def cancel(self, request: Request) -> None:
        """Take a request out, finished or not."""
        self.scheduler.finish(request)
        self.drafter.reset(request.id)

    def check_integrity(self) -> None:
        """Assert that pages, places and the null page are as they should be."""
        self.scheduler.check_integrity()
        for request in self.scheduler.running:
            most = request.context + self.runner.flights_of(request) * self._stride
            assert len(request.pages) >= pages_for(min(most, request.most_context))
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


def _check_tokens(what: str, tokens: Sequence[int], vocab: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise OptionError(f"{what} {shown(token)} is outside the vocabulary (0..{vocab - 1})")


def _options(requests: Sequence[Request]) -> StepOptions:
    """What a step must do for these requests."""
    return StepOptions(
        edits=any(one.edits is not None for one in requests),
        log_probs=any(one.params.logprobs is not None for one in requests),
    )


def _emit(request: Request, record: Record, logits: Tensor | None) -> StepResult:
    """Emit what a step chose for one request, up to its first stop or its last allowed token."""
    root = request.tokens[-1]
    kept = request.emit(record.emitted)
    if record.broken and request.finish_reason is None:
        request.fail(no_choice(request, request.context + len(record.emitted) + 1))
    if not kept:
        return StepResult(request, [], None, logits)
    log_probs: list[TokenLogProb] | None = None
    if request.params.logprobs is not None and record.log_probs is not None:
        log_probs = told(record.log_probs, kept, request.params.logprobs)
        request.log_probs += log_probs
    request.context += len(kept)
    request.stats.add_step(accepted=len(kept) - 1, nodes=record.tree.nodes)
    # The root stands for the first emitted token, and the last emitted one is the next root.
    walked = AcceptedPath(record.indices[: len(kept)], kept[-1])
    return StepResult(request, kept, StepTrace(root, record.tree, walked), logits, log_probs)
