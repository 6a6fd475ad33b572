"""Edits of logits in torch, every float32 operation rounded by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kdtree_engine.kernels.logit_edits import EditState

IN_PROMPT = 1 << 28
IS_STOP = 1 << 29
MOST_COUNTED = IN_PROMPT - 1
"""The bits of a word that count."""


def on_path(tokens: Tensor, ancestors: Tensor) -> Tensor:
    """[B, N, N] bool: whether row j is on the path of row i, the root excluded."""
    row = torch.arange(tokens.shape[1], device=tokens.device)
    return ((ancestors[:, :, None] >> row) & 1 == 1) & (row > 0)


def occurrences(tokens: Tensor, path: Tensor, vocab: int) -> Tensor:
    """[B N, V] int32: how often each token is on each row's path [B, N, N]."""
    counted = path & ((tokens >= 0) & (tokens < vocab))[:, None, :]
    names = tokens.clamp(0, vocab - 1)[:, None, :].expand_as(path)
    counts = torch.zeros(*tokens.shape, vocab, dtype=torch.int32, device=tokens.device)
    return counts.scatter_add_(2, names, counted.int()).flatten(0, 1)


def last_tokens(tokens: Tensor, path: Tensor, depths: Tensor, recent: Tensor) -> Tensor:
    """[B, N, S] int64: the tokens before what each row chooses, the latest first.

    recent [B, S]: those before the path. Of a path of depth d the s-th latest lies at depth d - s.
    """
    trees, nodes = tokens.shape
    back = torch.arange(recent.shape[1], device=tokens.device)
    at = depths[:, :, None] - back  # [B, N, S]
    there = path[:, :, None, :] & (depths[:, None, None, :] == at[:, :, :, None])
    own = torch.where(there, tokens[:, None, None, :], 0).sum(-1)
    older = recent.long()[:, None, :].expand(trees, nodes, -1).gather(2, (-at).clamp(min=0))
    return torch.where(at > 0, own, older)


def completed(phrases: Tensor, latest: Tensor, vocab: int) -> Tensor:
    """[B N, V] bool: the tokens that would complete a phrase of phrases [B, F, S + 1].

    latest: [B, N, S], as last_tokens gives it.
    """
    before = phrases[:, None, :, 1:]
    agree = ((before < 0) | (before == latest[:, :, None, :])).all(-1)  # [B, N, F]
    ends = phrases[:, None, :, 0].long().expand_as(agree)
    hit = agree & (ends >= 0) & (ends < vocab)
    found = torch.zeros(*latest.shape[:2], vocab, dtype=torch.int32, device=latest.device)
    return found.scatter_add_(2, ends.clamp(0, vocab - 1), hit.int()).flatten(0, 1) > 0


def edit_logits(
    logits: Tensor,
    state: EditState,
    places: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    depths: Tensor,
) -> Tensor:
    """See the operator."""
    if not bool(state.active[places].any()):
        return logits.clone()
    vocab, nodes = logits.shape[1], tokens.shape[1]
    place = places.repeat_interleave(nodes)  # of every row
    path = on_path(tokens, ancestors)
    word, bias = state.words[place], state.bias[place]
    count = (word & MOST_COUNTED) + occurrences(tokens, path, vocab)
    emitted = count > 0
    seen = emitted | (word & IN_PROMPT != 0)
    repetition, frequency, presence = (
        value[place][:, None] for value in (state.repetition, state.frequency, state.presence)
    )
    x = torch.where(logits > 0, logits / repetition, logits * repetition)
    x = torch.where(seen & (repetition != 1), x, logits)
    x = torch.where(emitted & (frequency != 0), x - frequency * count.float(), x)
    x = torch.where(emitted & (presence != 0), x - presence, x)
    x = torch.where(bias != 0, x + bias, x)
    early = (state.quiet[place] > depths.flatten())[:, None]
    latest = last_tokens(tokens, path, depths, state.recent[places])
    forbidden = (bias == -torch.inf) | (early & (word & IS_STOP != 0))
    forbidden |= completed(state.phrases[places], latest, vocab)
    x = torch.where(forbidden, -torch.inf, x)
    edited = logits.isfinite() & state.active[place][:, None]
    return torch.where(edited, x, logits)


def remember(state: EditState, places: Tensor, emitted: Tensor, lengths: Tensor) -> None:
    """See the operator."""
    vocab, back = state.words.shape[1], state.recent.shape[1]
    moving = ((lengths > 0) & state.active[places]).nonzero().flatten()
    places, emitted, lengths = places[moving], emitted[moving], lengths[moving, None]
    step = torch.arange(emitted.shape[1], device=emitted.device)
    counted = (step < lengths) & (emitted >= 0) & (emitted < vocab)
    where = (places[:, None].expand_as(emitted), emitted.clamp(0, vocab - 1))
    state.words.index_put_(where, counted.int(), accumulate=True)
    # the latest of `emitted` first, then what was recent
    index = torch.arange(back, device=emitted.device).expand(len(places), back)
    fresh = emitted.gather(1, (lengths - 1 - index).clamp(min=0))
    old = state.recent[places].gather(1, (index - lengths).clamp(min=0))
    state.recent[places] = torch.where(index < lengths, fresh.int(), old)
    state.quiet[places] -= lengths[:, 0].int()
