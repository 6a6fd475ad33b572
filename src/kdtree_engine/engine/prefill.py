"""A piece of one request's prompt: the step's forward over a causal run. Its rows go straight to
the request's pages, so there is nothing to walk and nothing to move. A request that was preempted
computes its prompt and its output anew in the same way.
"""

from __future__ import annotations

from kdtree_engine.engine.batch import prompt_inputs, sampling_rows
from kdtree_engine.engine.request import Request, StepResult, non_finite
from kdtree_engine.engine.step import StepParts, Stopwatch
from kdtree_engine.sampling import sample


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
    ends = request.context + count == request.fill
    if request.keep_logits:
        request.logits.append(out.logits)
    elif ends and request.is_rootless:
        standing = parts.state.at(inputs.tokens.new_full((1,), request.place))
        picks = sample(out.logits, sampling_rows(standing, inputs.positions[-1:]))
        if bool(picks.finite):
            chosen = [int(picks.tokens)]
        else:
            request.fail(non_finite(request.prompt_tokens))
    watch.lap("sample")
    if request.error is None:
        if out.taps is not None:
            assert drafter.on_device, "only a device drafter is shown the target's states"
            drafter.observe(out.taps, inputs.positions, inputs.slots)
        request.context += count
        request.is_prefill = not ends
    kept = request.emit(chosen) if chosen else []
    if not request.is_prefill and request.finish_reason is None:
        parts.state.start(request)
    watch.lap("commit")
    request.stats.add_seconds(watch.seconds)
    return StepResult(request, kept, None, out.logits)
