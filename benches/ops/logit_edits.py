"""Edits of logits and log-probabilities over 163,840 tokens: 1, 8 and 64 rows.

The floor is that of a copy: every logit read and written once. Settings: "off" is a place that is
not active, so nothing but that copy; "bias" reads a place's biases; "all" its counts as well, once
a place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kdtree_engine.kernels import logit_edits, top_k
from kdtree_engine.kernels.logit_edits import cases, reference
from kdtree_engine.kernels.logit_edits.cases import Case, Inputs
from ops.base import Variant

VOCAB, CALLS = 163_840, 4
# trees and rows of each: plain decoding of 1 and 8 requests, trees of 8 and 64 rows
STEPS = ((1, 1), (8, 1), (1, 8), (1, 64))
ALL = Case(1, 1, VOCAB, 40, (1.1,), (0.1,), (0.2,), 0.01, (3,), 64)
SETTINGS = {
    "off": ALL._replace(inactive=1),
    "bias": Case(1, 1, VOCAB, 40, bias=0.01),
    "all": ALL,
}
LAUNCHES = ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8))


def on_device(case: Case) -> list[Inputs]:
    """One input a call, with logits of its own, so that they come from memory."""
    given = cases.inputs(case, device="cuda")
    return [given._replace(logits=given.logits + call) for call in range(CALLS)]


def differs(got: Tensor, want: Tensor) -> str | None:
    count = int((got.view(torch.int32) != want.view(torch.int32)).sum())
    return f"{count} logits differ" if count else None


def variants() -> Iterator[Variant]:
    """Chunks and warps of the edits, the memory's write, and the log-probabilities."""
    for trees, rows in STEPS:
        for name, case in SETTINGS.items():
            given = on_device(case._replace(trees=trees, rows=rows))
            yield from _edits(f"edits {trees}x{rows} {name}", given)
        yield from _memory(trees, given[0])
        yield from _log_probs(trees * rows)


def _edits(name: str, given: list[Inputs]) -> Iterator[Variant]:
    want = reference.edit_logits(*given[0])
    for chunk, warps in LAUNCHES:

        def run(call: int, chunk: int = chunk, warps: int = warps) -> Tensor:
            return logit_edits._launch_edits(*given[call], chunk=chunk, warps=warps)

        yield Variant(
            f"{name} | chunk {chunk} warps {warps}",
            run,
            lambda run=run: differs(run(0), want),  # type: ignore[misc]
            CALLS,
            2 * want.nbytes,
        )


def _memory(trees: int, given: Inputs) -> Iterator[Variant]:
    emitted = torch.arange(trees * 8, device="cuda").view(trees, 8)
    lengths = torch.full((trees,), 5, device="cuda")

    def run(_: int) -> None:
        logit_edits.remember(given.state, given.places, emitted, lengths)

    def check() -> str | None:
        want = replace(
            given.state, **{name: value.clone() for name, value in vars(given.state).items()}
        )
        reference.remember(want, given.places, emitted, lengths)
        run(0)
        pairs = zip(vars(given.state).items(), vars(want).values(), strict=True)
        wrong = [name for (name, one), other in pairs if not torch.equal(one, other)]
        return f"{wrong} differ" if wrong else None

    yield Variant(f"remember R={trees}", run, check, CALLS, 0)


def _log_probs(rows: int) -> Iterator[Variant]:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = [torch.randn(rows, VOCAB, generator=generator, device="cuda") for _ in range(CALLS)]
    chosen = torch.arange(rows, device="cuda")

    def run(call: int) -> top_k.TokenLogProbs:
        return top_k.token_log_probs(logits[call], chosen)

    def check() -> str | None:
        got = run(0)
        want = logits[0].double().log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        worst = float((got.chosen - want).abs().max())
        return f"error {worst:.1e}" if worst > 1e-5 else None

    yield Variant(f"log-probs {rows} rows", run, check, CALLS, logits[0].nbytes)
