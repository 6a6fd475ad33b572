"""Requests: what a user asks, where a request stands, what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from kdtree_engine.errors import OptionError
from kdtree_engine.sampling import check_filters
from kdtree_engine.types import AcceptedPath, DraftTree

_MOST_SAMPLES = 128
_MOST_TOP_K = 2**31 - 1  # no vocabulary is larger, and tensors of settings hold it


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. Raises OptionError for a value out of range.

    max_tokens: tokens to make at most. temperature: 0 takes the likeliest. top_k, top_p, min_p:
    None means off. seed: any integer; None draws one, which the output reports. stop_token_ids: end
    the text like the model's own stop tokens. ignore_eos: go on after the model's own. n: outputs
    for each prompt, 1 to 128; the i-th, from 0, is drawn with seed + i (modulo 2^64).
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "n"):
            _check_number(name, getattr(self, name), Integral, "an integer")
        for name in ("temperature", "top_p", "min_p"):
            _check_number(name, getattr(self, name), Real, "a number")
        if self.max_tokens < 1:
            raise OptionError(f"max_tokens {self.max_tokens} must be 1 or more")
        if not 1 <= self.n <= _MOST_SAMPLES:
            raise OptionError(f"n {self.n} must be from 1 to {_MOST_SAMPLES}")
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        check_filters(*self.filters)

    @property
    def filters(self) -> tuple[float, int, float, float]:
        """Temperature, top-k, top-p and min-p, with the values that do nothing for None."""
        return (
            self.temperature,
            0 if self.top_k is None else min(self.top_k, _MOST_TOP_K),
            1.0 if self.top_p is None else self.top_p,
            0.0 if self.min_p is None else self.min_p,
        )


def _token_ids(stops: object) -> tuple[int, ...]:
    """Stop tokens as given; None is none."""
    if stops is None:
        return ()
    ids = tuple(stops) if isinstance(stops, Iterable) else (None,)
    if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in ids):
        raise OptionError(f"stop_token_ids {stops!r} must be a list of token ids")
    return tuple(int(one) for one in ids)


def _check_number(name: str, value: object, kind: type, wanted: str) -> None:
    """None stands for "off" or "draw one" where the field allows it."""
    optional = name not in ("max_tokens", "temperature", "n")
    if (value is None and optional) or (isinstance(value, kind) and not isinstance(value, bool)):
        return
    raise OptionError(f"{name} {value!r} must be {wanted}{' or None' if optional else ''}")


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
class RequestOutput:
    """A finished request. finish_reason: "stop", "length", or "error" (then `error` says why).
    sample: which of its prompt's n outputs it is, from 0.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    stats: RequestStats
    prompt_tokens: int
    error: str | None = None
    sample: int = 0


@dataclass(frozen=True, eq=False)
class StreamEvent:
    """What a step added to a request; the last event carries the output."""

    text: str
    token_ids: list[int]
    step: StepTrace | None = None
    output: RequestOutput | None = None


@dataclass(eq=False)
class Request:
    """Where a request stands. While decoding, `context` is len(tokens) - 1: all but the root.

    tokens: prompt, then output. context: tokens whose latents are committed. place: its scratch
    page. pages: its cache pages, `chains` the hashes of those already published. stops: ids that
    end it. keep_logits: prompt only, every row's logits wanted; they gather in `logits`. fill: how
    many tokens its prefill computes. sample: its number among those of one prompt. after: while
    waiting, the request whose prompt it shares and lets go first.
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
    fill: int = field(init=False)
    context: int = 0
    is_prefill: bool = True
    place: int = -1
    pages: list[int] = field(default_factory=list)
    chains: list[bytes] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    finish_reason: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.fill = self.prompt_tokens

    @property
    def is_rootless(self) -> bool:
        """Whether the root is still to be chosen, by the last token that the prefill computes."""
        return self.fill == len(self.tokens)

    @property
    def most_context(self) -> int:
        """Tokens that its pages will ever have to hold."""
        return self.prompt_tokens + self.most_tokens

    @property
    def output_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.most_tokens - (len(self.tokens) - self.prompt_tokens)

    def emit(self, tokens: list[int]) -> list[int]:
        """Append tokens up to the first stop or the last allowed one; returns those kept."""
        kept: list[int] = []
        for token in tokens[: self.remaining]:
            kept.append(token)
            if token in self.stops:
                self.finish_reason = "stop"
                break
        self.tokens.extend(kept)
        self.stats.tokens += len(kept)
        if self.finish_reason is None and self.remaining == 0:
            self.finish_reason = "length"
        return kept

    def rewind(self) -> None:
        """Give up what was computed but not what was emitted: a prefill is to compute it anew, up
        to the root where there is one. Logits that were to be kept come again with it.
        """
        if not self.is_prefill:
            self.fill = len(self.tokens) - 1
        self.is_prefill = True
        self.context = 0
        self.pages, self.chains, self.logits = [], [], []
        self.place = -1

    def fail(self, reason: str) -> None:
        """End with an error; what was emitted before stays."""
        self.finish_reason, self.error = "error", reason


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step did for one request: its new tokens, and the tree that gave them (None for a
    piece of prompt). logits: [rows, V] of the request's rows, for tests; a decode step has them
    where the engine's runner keeps them.
    """

    request: Request
    tokens: list[int]
    trace: StepTrace | None = None
    logits: Tensor | None = None


def non_finite(position: int) -> str:
    """The error of a request whose token at `position` could not be chosen."""
    return (
        f"the model gave logits that are not finite for position {position}: the weights or the "
        "cache hold NaN or infinite values, or the dtype is too narrow for this model"
    )
