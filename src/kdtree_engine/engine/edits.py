"""From a request's options to what its place on the device does to logits."""

from __future__ import annotations

from kdtree_engine.engine.request import Request
from kdtree_engine.engine.sampling_params import SamplingParams
from kdtree_engine.errors import OptionError
from kdtree_engine.kernels.logit_edits import EditState
from kdtree_engine.sampling import Edits, check_edits, place_edits
from kdtree_engine.tokenizer import Tokenizer


def edits_of(params: SamplingParams, tokenizer: Tokenizer | None, vocab: int) -> Edits | None:
    """What the options change in logits, in token ids; None where nothing. Raises OptionError."""
    if not params.edits_logits:
        return None
    edits = Edits(
        *params.penalties,
        bias=params.logit_bias or {},
        allowed=params.allowed_token_ids,
        bad=_sequences(params, tokenizer),
        min_tokens=params.min_tokens,
    )
    check_edits(edits, vocab)
    return edits


def _sequences(params: SamplingParams, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """The token sequences of `bad_words`: a text as it is written, as it is tokenised with a space
    before it, and without.
    """
    found: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for word in params.bad_words or ():
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise OptionError("bad_words has texts, but the model has no tokenizer: give token ids")
        bare = word.lstrip(" ")
        for text in (word, bare, " " + bare):
            if text:
                found[tuple(tokenizer.encode(text))] = None
    return list(found)


def edits_of_place(request: Request, vocab: int) -> EditState | None:
    """What its place must hold for the request's options and all its tokens so far, on the host;
    None for a request without options.
    """
    if request.edits is None:
        return None
    prompt = request.tokens[: request.prompt_tokens]
    return place_edits(request.edits, prompt, request.output_ids, sorted(request.stops), vocab)
