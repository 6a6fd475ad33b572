"""What a request's options do to logits, as the device has it: one row of tables per place."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from kdtree_engine.engine.request import Request
from kdtree_engine.engine.sampling_params import SamplingParams
from kdtree_engine.errors import OptionError
from kdtree_engine.kernels.logit_edits import IN_PROMPT, IS_STOP, LENGTH, PHRASES, EditState
from kdtree_engine.tokenizer import Tokenizer


def forbidden_sequences(
    params: SamplingParams, tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], ...]:
    """The token sequences of `bad_words`. OptionError for too many, or too long a one."""
    found: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for word in params.bad_words or ():
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise OptionError("bad_words has texts, but the model has no tokenizer: give token ids")
        for text in (word, " " + word.lstrip(" ")):
            found[tuple(tokenizer.encode(text))] = None
    longest = max(map(len, found), default=0)
    if longest > LENGTH:
        raise OptionError(f"bad_words has a word of {longest} tokens; at most {LENGTH}")
    phrases = sum(len(one) > 1 for one in found)
    if phrases > PHRASES:
        raise OptionError(
            f"bad_words makes {phrases} sequences of two or more tokens; at most {PHRASES}"
        )
    return tuple(found)


def check_tokens(
    params: SamplingParams, forbidden: tuple[tuple[int, ...], ...], vocab: int
) -> None:
    """OptionError for a token id outside of the vocabulary in any option."""
    options = {
        "stop_token_ids": params.stop_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [token for word in forbidden for token in word],
    }
    for name, tokens in options.items():
        for token in tokens:
            if not 0 <= token < vocab:
                raise OptionError(
                    f"{name}: token {token} is outside the vocabulary (0..{vocab - 1})"
                )


def write_edits(state: EditState, request: Request) -> None:
    """Fill the tables of the request's place, from its options and all its tokens so far."""
    params, place = request.params, request.place
    state.active[place] = params.edits_logits
    if not params.edits_logits:
        return
    device, vocab = state.words.device, state.words.shape[1]
    state.words[place] = _words(request, vocab).to(device)
    state.bias[place] = _bias(request, vocab).to(device)
    repetition, frequency, presence = params.penalties
    state.repetition[place] = repetition
    state.frequency[place] = frequency
    state.presence[place] = presence
    state.quiet[place] = params.min_tokens - len(request.output_ids)
    state.recent[place] = _backwards(request.tokens, LENGTH - 1).to(device)
    phrases = [word for word in request.forbidden if len(word) > 1]
    rows = [_backwards(word, LENGTH) for word in phrases]
    rows += [_backwards((), LENGTH)] * (PHRASES - len(rows))
    state.phrases[place] = torch.stack(rows).to(device)


def _words(request: Request, vocab: int) -> Tensor:
    """[V] int32: counts of the output, and what else is known of each token."""
    words = torch.zeros(vocab, dtype=torch.int32)
    counts = Counter(request.output_ids)
    if counts:
        words[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.int32)
    words[sorted(set(request.tokens[: request.prompt_tokens]))] |= IN_PROMPT
    if request.stops:
        words[sorted(request.stops)] |= IS_STOP
    return words


def _bias(request: Request, vocab: int) -> Tensor:
    """[V] float32: what is added; -inf forbids."""
    params = request.params
    bias = torch.zeros(vocab)
    if params.logit_bias:
        bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
    if params.allowed_token_ids is not None:
        allowed = torch.zeros(vocab, dtype=torch.bool)
        allowed[list(params.allowed_token_ids)] = True
        bias[~allowed] = -torch.inf
    single = [word[0] for word in request.forbidden if len(word) == 1]
    bias[single] = -torch.inf
    return bias


def _backwards(tokens: list[int] | tuple[int, ...], length: int) -> Tensor:
    """[length] int32: the last tokens, latest first, then -1."""
    last = list(tokens[-length:])[::-1]
    return torch.tensor(last + [-1] * (length - len(last)), dtype=torch.int32)
