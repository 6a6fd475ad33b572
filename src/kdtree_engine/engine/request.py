"""Requests: what a user asks, where a request stands, what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kdtree_engine.engine.sampling_params import SamplingParams
from kdtree_engine.sampling import Edits
from kdtree_engine.tokenizer.stops import StopStream
from kdtree_engine.types import AcceptedPath, DraftTree


@dataclass
class RequestStats:
    """steps: decode steps, prefill not counted. tokens: emitted. accepted: per step, drafts
    accepted (root and next token not counted), nodes: per step, drafts verified. seconds: per
    phase, of the steps that the request took part in. cached_tokens: prompt tokens found in the
    prefix cache when it was first admitted. preemptions: how often it lost its pages to others and
    computed them anew.
    """

    steps: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def tokens_per_step(self) -> float:
        """1 + the mean number of accepted drafts; 0 before the first step."""
        return 1.0 + sum(self.accepted) / self.steps if self.steps else 0.0

    def add_step(self, accepted: int, nodes: int) -> None:
        """Count a decode step."""
        self.steps += 1
        self.accepted.append(accepted)
        self.nodes.append(nodes)

    def add_seconds(self, phases: Mapping[str, float]) -> None:
        """Add a step's time per phase."""
        for phase, seconds in phases.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_step": self.tokens_per_step,
            "accepted": self.accepted,
            "nodes": self.nodes,
            "seconds": self.seconds,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
        }


@dataclass(frozen=True, eq=False)
class StepTrace:
    """One decode step of one request: the root token, the verified tree, the path taken."""

    root: int
    tree: DraftTree
    path: AcceptedPath


@dataclass(frozen=True)
class TokenLogProb:
    """How likely the model thought a token: natural logarithms of its own distribution, before
    penalties, temperature and filters. top: the likeliest tokens, as many as were asked for.
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. finish_reason: "stop", "length", or "error" (then `error` says why).

    sample: which of its prompt's n outputs it is, from 0. stopped_by: the stop token or the stop
    text that ended it. log_probs: one a token of `token_ids`, where asked for; prompt_log_probs:
    one a prompt token, None for the first.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    stats: RequestStats
    prompt_tokens: int
    error: str | None = None
    sample: int = 0
    stopped_by: int | str | None = None
    log_probs: list[TokenLogProb] | None = None
    prompt_log_probs: list[TokenLogProb | None] | None = None


@dataclass(frozen=True, eq=False)
class StreamEvent:
    """What a step added to a request; the last event carries the output. Text that may yet become a
    stop text comes later than its tokens. log_probs: one a token, where asked for.
    """

    text: str
    token_ids: list[int]
    step: StepTrace | None = None
    output: RequestOutput | None = None
    log_probs: list[TokenLogProb] | None = None


@dataclass(eq=False)
class Request:
    """Where a request stands. While decoding, `context` is len(tokens) - 1: all but the root.

    tokens: prompt, then output. context: tokens whose latents are committed. place: its scratch
    page. pages: its cache pages. chains: hashes of the token chains that its full pages end, as far
    as somebody asked. published: pages that others may find. stops: ids that end it. keep_logits:
    prompt only, every row's logits wanted; they gather in `logits`. fill: how many tokens its
    prefill computes. sample: its number among those of one prompt. after: while waiting, the
    request whose prompt it shares and lets go first. edits: what its options change in logits.
    text: looks for stop texts, where there are any. stopped_by: the stop token or text that ended
    it.
    """

    id: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    prompt_tokens: int
    most_tokens: int  # emitted at most: max_tokens, or what the positions leave
    stops: frozenset[int]
    keep_logits: bool = False
    sample: int = 0
    after: Request | None = None
    edits: Edits | None = None
    text: StopStream | None = None
    fill: int = field(init=False)
    context: int = 0
    is_prefill: bool = True
    place: int = -1
    pages: list[int] = field(default_factory=list)
    chains: list[bytes] = field(default_factory=list)
    published: int = 0
    logits: list[Tensor] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    finish_reason: str | None = None
    stopped_by: int | str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.fill = self.prompt_tokens

    @property
    def is_rootless(self) -> bool:
        """Whether the root is still to be chosen, by the last token that the prefill computes."""
        return self.fill == len(self.tokens)

    @property
    def most_context(self) -> int:
        """Tokens that its pages will ever have to hold: all but the last one emitted."""
        return self.prompt_tokens + max(self.most_tokens - 1, 0)

    @property
    def output_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def reads_all_rows(self) -> bool:
        """Whether the logits of every prompt row are wanted, so that none may come from a cache."""
        return self.keep_logits or self.scores_prompt

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are wanted and not known."""
        return self.params.prompt_logprobs is not None and self.is_rootless

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.most_tokens - (len(self.tokens) - self.prompt_tokens)

    def emit(self, tokens: list[int]) -> list[int]:
        """Append tokens up to the first stop or the last allowed one; returns those kept."""
        kept: list[int] = []
        for token in tokens[: self.remaining]:
            kept.append(token)
            self.stopped_by = self._stop_at(token)
            if self.stopped_by is not None:
                self.finish_reason = "stop"
                break
        self.tokens.extend(kept)
        self.stats.tokens += len(kept)
        if self.finish_reason is None and self.remaining == 0:
            self.finish_reason = "length"
        return kept

    def _stop_at(self, token: int) -> int | str | None:
        if token in self.stops:
            return token
        if self.text is None:
            return None
        self.text.push([token])
        return self.text.found

    def rewind(self) -> None:
        """Give up what was computed but not what was emitted: a prefill is to compute it anew, up
        to the root where there is one. Logits that were to be kept come again with it.
        """
        if not self.is_prefill:
            self.fill = len(self.tokens) - 1
        self.is_prefill = True
        self.context = 0
        self.pages, self.published, self.logits = [], 0, []
        if self.scores_prompt:
            self.prompt_log_probs = []
        self.place = -1

    def fail(self, reason: str) -> None:
        """End with an error; what was emitted before stays."""
        self.finish_reason, self.error = "error", reason


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step did for one request: its new tokens, and the tree that gave them (None for a
    piece of prompt). logits: [rows, V] of the request's rows, for tests; a decode step has them
    where the engine's runner keeps them. log_probs: one a token, where asked for.
    """

    request: Request
    tokens: list[int]
    trace: StepTrace | None = None
    logits: Tensor | None = None
    log_probs: list[TokenLogProb] | None = None


def no_choice(request: Request, position: int) -> str:
    """The error of a request whose token at `position` could not be chosen."""
    broken = (
        f"the model gave logits that are not finite for position {position}: the weights or the "
        "cache hold NaN or infinite values, or the dtype is too narrow for this model"
    )
    if request.edits is None:
        return broken
    return (
        f"no token could be chosen for position {position}: allowed_token_ids, bad_words, "
        f"logit_bias and min_tokens leave none, or {broken}"
    )
