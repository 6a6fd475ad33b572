"""What a user may ask of one request's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import cast

from kdtree_engine.engine.inputs import entries, real, truth, whole
from kdtree_engine.errors import OptionError, shown
from kdtree_engine.kernels.top_k import LOG_PROBS
from kdtree_engine.sampling import check_filters, check_penalties

_MOST_TOP_K = 2**31 - 1  # no vocabulary is larger, and tensors of settings hold it
_MOST_SAMPLES = 128
_MOST_BIAS = 100.0
_MOST_STOPS = 16
_LONGEST_STOP = 256  # characters
_MOST_ENTRIES = 1 << 20  # of a list of tokens: more than any vocabulary has


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and what is told of them. Raises OptionError for a
    value out of range.

    max_tokens: tokens to make at most. temperature: 0 takes the likeliest. top_k, top_p, min_p:
    None means off. seed: any integer; None draws one, which the output reports. n: outputs for each
    prompt, 1 to 128; the i-th, from 0, is drawn with seed + i (modulo 2^64).

    What ends the text. stop_token_ids: like the model's own stop tokens. stop: texts that end it,
    and are not part of it. ignore_eos: go on after the model's own stop tokens. min_tokens: no stop
    token is chosen, and no stop text looked for, before so many tokens are out.

    What changes the logits, in this order, before temperature and filters (docs/sampling.md).
    repetition_penalty: logits of tokens in the prompt or the output are divided by it, or
    multiplied where negative; 1 is off. frequency_penalty, presence_penalty: -2 to 2, taken off
    once per time that a token came, and once if it came, in the output. logit_bias: token id to
    -100..100, added. allowed_token_ids: nothing else is chosen. bad_words: texts, or lists of token
    ids, that do not come; a text is forbidden as it is tokenised, with a space before it and
    without.

    What is reported, of the model's own distribution before all of these. logprobs: the
    log-probability of each token, and of so many likeliest ones (0 to 20); None is off.
    prompt_logprobs: the same for the prompt's tokens.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name in _WHOLE:
            self._set(name, whole)
        for name in _REAL:
            self._set(name, real)
        truth("ignore_eos", self.ignore_eos)
        if self.max_tokens < 1:
            raise OptionError(f"max_tokens {self.max_tokens} must be 1 or more")
        if not 1 <= self.n <= _MOST_SAMPLES:
            raise OptionError(f"n {self.n} must be from 1 to {_MOST_SAMPLES}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise OptionError(
                f"min_tokens {self.min_tokens} must be 0 to max_tokens, {self.max_tokens}"
            )
        check_filters(*self.filters)
        check_penalties(*self.penalties)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= LOG_PROBS:
                raise OptionError(f"{name} {count} must be 0 to {LOG_PROBS}, or None for none")
        for name, value in (
            ("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)),
            ("stop", _stops(self.stop)),
            ("logit_bias", _bias(self.logit_bias)),
            ("bad_words", _bad_words(self.bad_words)),
        ):
            object.__setattr__(self, name, value)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise OptionError("allowed_token_ids is empty: nothing could be chosen")
            object.__setattr__(self, "allowed_token_ids", allowed)

    def _set(self, name: str, kind: Callable[..., int | float]) -> None:
        """A field as Python's own number; None stays where the field may be None."""
        value, optional = getattr(self, name), name in _OPTIONAL
        if value is None and optional:
            return
        number = kind(name, value, also=" or None" if optional else "")
        object.__setattr__(self, name, number)

    @property
    def filters(self) -> tuple[float, int, float, float]:
        """Temperature, top-k, top-p and min-p, with the values that do nothing for None."""
        return (
            self.temperature,
            0 if self.top_k is None else min(self.top_k, _MOST_TOP_K),
            1.0 if self.top_p is None else self.top_p,
            0.0 if self.min_p is None else self.min_p,
        )

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence; 1, 0, 0 do nothing."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def edits_logits(self) -> bool:
        """Whether anything stands between the model's logits and temperature."""
        return (
            self.penalties != (1.0, 0.0, 0.0)
            or self.min_tokens > 0
            or self.allowed_token_ids is not None
            or bool(self.logit_bias)
            or bool(self.bad_words)
        )


_OPTIONAL = ("top_k", "top_p", "min_p", "seed", "logprobs", "prompt_logprobs")
_WHOLE = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs", "n")
_REAL = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def _token_ids(name: str, given: object) -> tuple[int, ...]:
    """Token ids as given; None is none."""
    if given is None:
        return ()
    ids = entries(name, given, _MOST_ENTRIES, "a list of token ids")
    if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in ids):
        raise OptionError(f"{name} {shown(given, 80)} must be a list of token ids")
    return tuple(int(cast(int, one)) for one in ids)


def _stops(given: object) -> tuple[str, ...]:
    """One text or several; None is none."""
    stops = (given,) if isinstance(given, str) else () if given is None else given
    if not isinstance(stops, Sequence) or not all(isinstance(one, str) for one in stops):
        raise OptionError(f"stop {shown(given, 80)} must be a text or a list of texts")
    if len(stops) > _MOST_STOPS:
        raise OptionError(f"stop has {len(stops)} texts; at most {_MOST_STOPS}")
    for one in stops:
        if not 0 < len(one) <= _LONGEST_STOP:
            raise OptionError(
                f"stop text {shown(one, 40)} has {len(one)} characters; 1 to {_LONGEST_STOP}"
            )
    return tuple(stops)


def _bias(given: object) -> dict[int, float] | None:
    """Token ids and what is added to their logits."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise OptionError(f"logit_bias {shown(given, 80)} must map token ids to numbers")
    bias: dict[int, float] = {}
    for token, value in given.items():
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise OptionError(f"logit_bias key {shown(token, 40)} must be a token id, an integer")
        number = real(f"logit_bias of token {shown(token)}", value)
        if not abs(number) <= _MOST_BIAS:
            raise OptionError(f"logit_bias of token {shown(token)} is {number}: -100 to 100")
        bias[int(token)] = number
    return bias


def _bad_words(given: object) -> tuple[str | tuple[int, ...], ...]:
    """Texts and lists of token ids, none of them empty."""
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise OptionError(f"bad_words {shown(given, 80)} must be a list of texts or of token ids")
    words = [one if isinstance(one, str) else _token_ids("bad_words", one) for one in given]
    if not all(words):
        raise OptionError("bad_words has an empty entry; give texts or lists of token ids")
    return tuple(words)
