"""A piece of one request's prompt: the step's forward over a causal run. Its rows go straight to
the request's pages, so there is nothing to walk and nothing to move. A request that was preempted
computes its prompt and its output anew in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_engine.engine.batch import prompt_inputs, sampling_rows
from kdtree_engine.engine.record import told
from kdtree_engine.engine.request import Request, StepResult, TokenLogProb, no_choice
from kdtree_engine.engine.state import upload
from kdtree_engine.engine.step import StepParts, Stopwatch
from kdtree_engine.kernels.logit_edits import edit_logits, remember
from kdtree_engine.kernels.top_k import LOG_PROBS, token_log_probs
from kdtree_engine.sampling import Sampled, sample


def prefill(parts: StepParts, request: Request, count: int) -> StepResult:
    """Compute the next `count` tokens; the prompt's end chooses the first token of the output.

    The host waits for that token: it decides whether the request goes on. Where the root is known,
    as after a preemption, nothing is chosen and nobody waits.
    """
    watch = Stopwatch()
    layout, drafter = parts.pool.layout, parts.drafter
    inputs = prompt_inputs(request, count, parts.state)
    watch.lap("batch")
    reserved = (layout.null_slot, layout.spill_slot)
    out = parts.target.forward(inputs, parts.pool.latents, reserved, drafter.tap_layers)
    watch.lap("forward")
    chosen: list[int] = []
    log_probs: list[TokenLogProb] = []
    ends = request.context + count == request.fill
    if request.scores_prompt:
        _score_prompt(request, out.logits)
    if request.keep_logits:
        request.logits.append(out.logits)
    elif ends and request.is_rootless:
        logits = out.logits[-1:]
        picks = _first_token(parts, request, logits, inputs.positions[-1:])
        if bool(picks.finite):
            chosen = [int(picks.tokens)]
            log_probs = _log_probs(request.params.logprobs, logits, picks.tokens, chosen)
        else:
            request.fail(no_choice(request, request.prompt_tokens))
    watch.lap("sample")
    if request.error is None:
        if out.taps is not None:
            assert drafter.on_device, "only a device drafter is shown the target's states"
            drafter.observe(out.taps, inputs.positions, inputs.slots)
        request.context += count
        request.is_prefill = not ends
    kept = request.emit(chosen) if chosen else []
    request.log_probs += log_probs
    if not request.is_prefill and request.finish_reason is None:
        parts.state.start(request)
    watch.lap("commit")
    request.stats.add_seconds(watch.seconds)
    return StepResult(request, kept, None, out.logits, log_probs or None)


def _first_token(parts: StepParts, request: Request, logits: Tensor, position: Tensor) -> Sampled:
    """Choose the first token from the prompt's last row of logits [1, V]: a tree of a root alone,
    which has been remembered as a part of the prompt.
    """
    place = position.new_full((1,), request.place)
    edits = parts.state.edits
    if request.edits is None or edits is None:
        return sample(logits, sampling_rows(parts.state.at(place), position))
    none, root = position.new_zeros((1, 1)), position.new_ones((1, 1))
    edited = edit_logits(logits, edits, place, none, root, none)
    picks = sample(edited, sampling_rows(parts.state.at(place), position))
    remember(edits, place, picks.tokens[:, None], picks.finite.long())
    return picks


def _score_prompt(request: Request, logits: Tensor) -> None:
    """Add the log-probabilities of the prompt tokens that these rows [count, V] foretell."""
    first = request.context + 1
    following = request.tokens[first : min(first + len(logits), request.prompt_tokens)]
    chosen = upload(torch.tensor(following, dtype=torch.int64), logits.device)
    request.prompt_log_probs += _log_probs(
        request.params.prompt_logprobs, logits[: len(following)], chosen, following
    )


def _log_probs(
    wanted: int | None, logits: Tensor, chosen: Tensor, tokens: list[int]
) -> list[TokenLogProb]:
    """Of `tokens`, on the device chosen [R], by logits [R, V]; none where none are wanted."""
    if wanted is None or not tokens:
        return []
    return told(token_log_probs(logits, chosen, LOG_PROBS), tokens, wanted)
