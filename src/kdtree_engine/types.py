"""Frozen values that travel between the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftBlock:
    """What a drafter proposes for the next H positions.

    tokens: [H, K] int64, the K likeliest candidates of each depth, likeliest first.
    log_probs: [H, K] float32, natural logarithms under the drafter's full softmax. They are
        marginals: the same row serves every parent at the depth above.

    Drafters that know edges between particular tokens will add an optional field of per-edge
    scores here; a block without one keeps the meaning above.
    """

    tokens: Tensor
    log_probs: Tensor

    @property
    def horizon(self) -> int:
        """The number of positions proposed, H."""
        return int(self.tokens.shape[0])


@dataclass(frozen=True, eq=False)
class DraftBlocks:
    """What a drafter proposes for B requests at once, padded to one shape.

    tokens: [B, H, K] int64. log_probs: [B, H, K] float32, as in `DraftBlock`, each depth's
    likeliest first; -inf where there is no candidate.
    """

    tokens: Tensor
    log_probs: Tensor

    @property
    def horizon(self) -> int:
        """The number of positions proposed, H."""
        return int(self.tokens.shape[1])


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A draft tree with its root, rows in the order they were made (a parent before its children).

    tokens: [n+1] int64, tokens[0] = -1: the root is the last sampled token, known to the engine.
    parents: [n+1] int64, rows, parents[0] = -1.
    depths: [n+1] int64, root 0, so a row's position is the root's plus its depth.
    scores: [n+1] float64, the drafter's log-probability of the path, root 0.0.
    All lie on the CPU.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor

    @property
    def nodes(self) -> int:
        """The number of nodes besides the root, n."""
        return int(self.tokens.shape[0]) - 1


@dataclass(frozen=True)
class AcceptedPath:
    """The path of a draft tree that the target agreed with.

    indices: rows of the tree from the root (0, always present) downwards; they rise strictly.
    next_token: the target's own token after the last of them, the next root.
    """

    indices: Sequence[int]
    next_token: int


@dataclass(frozen=True, eq=False)
class Span:
    """The rows of one request in a step: a causal run (prefill) or a draft tree.

    first, count: its rows in the step, consecutive.
    context: committed tokens of the request, all in the cache, before these rows.
    pages: [P] int64, the request's pages in order; they cover `context`, and the rows of a causal
    run. ancestors: [count] int64 masks over the span's rows (`tree.ancestor_bits`), None for a
    causal run.
    """

    first: int
    count: int
    context: int
    pages: Tensor
    ancestors: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SpanTable:
    """S spans of N rows each, known to the device alone: shapes are fixed, values are not.

    contexts: [S] int32, committed tokens of each request before these rows. pages: [S, P] int32,
    each request's pages in order; places it has no page for hold the spill page. ancestors: [S, N]
    int64 masks over the span's rows, None for one causal run (then S is 1, and row i of it sees the
    context and rows 0..i). Row r of the step belongs to span r // N.
    """

    contexts: Tensor
    pages: Tensor
    ancestors: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StepInputs:
    """One forward pass over R rows of any number of requests.

    tokens, positions: [R] int64. slots: [R] int64, where each row's latent goes (page * 64 +
    offset; a page of the request for prefill, scratch for a tree). spans: whose rows these are, as
    host values or as a table on the device, which a captured graph needs. logit_rows: [L] int64,
    the rows whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[Span, ...] | SpanTable
    logit_rows: Tensor


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """logits: [L, V] float32, in the order of `logit_rows`. taps: [R, n * H], concatenated, or
    None.
    """

    logits: Tensor
    taps: Tensor | None
