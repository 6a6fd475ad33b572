"""Penalties, biases and forbidden tokens of one request: their ranges, and its place's contents.

How a logit changes is in kernels/logit_edits. "Emitted" means chosen by the model for this request;
the prompt counts for the repetition penalty alone, and for the beginnings of phrases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kdtree_engine.errors import OptionError, shown
from kdtree_engine.kernels.logit_edits import (
    IN_PROMPT,
    IS_STOP,
    LENGTH,
    PHRASES,
    EditState,
    empty_edits,
)


@dataclass(frozen=True)
class Edits:
    """The settings of a request; the defaults change nothing.

    repetition, frequency, presence: penalties. bias: added to the logits of tokens. allowed: the
    only tokens that may come; None: all. bad: token sequences that may not come. min_tokens: no
    stop token among the first so many.
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] | None = None
    bad: Sequence[Sequence[int]] = ()
    min_tokens: int = 0


def check_penalties(repetition: float, frequency: float, presence: float) -> None:
    """Raise OptionError for a penalty out of range; 1, 0 and 0 are those that do nothing."""
    if not 0.01 <= repetition <= 10:
        raise OptionError(f"repetition_penalty {repetition} must be from 0.01 to 10; 1 is off")
    for name, value in (("frequency", frequency), ("presence", presence)):
        if not -2 <= value <= 2:
            raise OptionError(f"{name}_penalty {value} must be between -2 and 2; 0 is off")


def check_edits(edits: Edits, vocab: int) -> None:
    """Raise OptionError for a setting out of range, or for a token that logits do not have."""
    check_penalties(edits.repetition, edits.frequency, edits.presence)
    if not 0 <= edits.min_tokens < 2**31:
        raise OptionError(f"min_tokens {edits.min_tokens} must be 0 or more")
    for token, value in edits.bias.items():
        if not -100 <= value <= 100:
            raise OptionError(f"logit_bias {value} of token {token} must be between -100 and 100")
    _check_phrases(edits)
    options = {
        "logit_bias": edits.bias,
        "allowed_token_ids": edits.allowed or (),
        "bad_words": [token for words in edits.bad for token in words],
    }
    for name, tokens in options.items():
        for token in tokens:
            if not 0 <= token < vocab:
                raise OptionError(
                    f"{name}: token {shown(token)} is outside the vocabulary (0..{vocab - 1})"
                )
    if bool((_bias(edits, vocab) == -torch.inf).all()):
        raise OptionError("allowed_token_ids and bad_words leave no token that could be chosen")


def _check_phrases(edits: Edits) -> None:
    for words in edits.bad:
        if not 0 < len(words) <= LENGTH:
            raise OptionError(f"bad_words has a word of {len(words)} tokens; 1 to {LENGTH}")
    count = sum(len(words) > 1 for words in edits.bad)
    if count > PHRASES:
        raise OptionError(
            f"bad_words makes {count} sequences of two or more tokens; at most {PHRASES}"
        )


def place_edits(
    edits: Edits, prompt: Sequence[int], emitted: Sequence[int], stops: Sequence[int], vocab: int
) -> EditState:
    """What a place holds whose request has this prompt and has emitted these tokens: an EditState
    of one place, on the host. stops: the tokens that end the text; those beyond the vocabulary
    never come. `edits` has been checked.
    """
    state = empty_edits(1, vocab)
    words = state.words[0]
    words += _ids(emitted).bincount(minlength=vocab).int()
    words[_ids(prompt)] |= IN_PROMPT
    words[_ids([one for one in stops if 0 <= one < vocab])] |= IS_STOP
    state.bias[0] = _bias(edits, vocab)
    state.repetition[0] = edits.repetition
    state.frequency[0] = edits.frequency
    state.presence[0] = edits.presence
    state.quiet[0] = edits.min_tokens - len(emitted)
    last = [*prompt[1 - LENGTH :], *emitted[1 - LENGTH :]][:-LENGTH:-1]
    state.recent[0, : len(last)] = _ids(last).int()
    phrases = [phrase for phrase in edits.bad if len(phrase) > 1]
    for row, phrase in enumerate(phrases):
        state.phrases[0, row, : len(phrase)] = _ids(phrase[::-1]).int()
    state.active[0] = edits != Edits()
    return state


def _bias(edits: Edits, vocab: int) -> Tensor:
    """[V] float32; -inf where a token may not come."""
    bias = torch.zeros(vocab)
    if edits.bias:
        bias[_ids(list(edits.bias))] = torch.tensor(list(edits.bias.values()), dtype=torch.float32)
    if edits.allowed is not None:
        kept = _ids(edits.allowed)
        bias = torch.full_like(bias, -torch.inf).index_copy(0, kept, bias[kept])
    bias[_ids([words[0] for words in edits.bad if len(words) == 1])] = -torch.inf
    return bias


def _ids(tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)
