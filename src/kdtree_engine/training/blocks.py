"""Draft blocks at random anchors of a sequence, and their loss (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.drafter.dflash_model import BlockPositions, DFlashModel
from kdtree_engine.kernels.linear import linear
from kdtree_engine.model import Kimi
from kdtree_engine.training.lessons import Lesson


@dataclass(frozen=True, eq=False)
class BlockBatch:
    """N blocks in each of B sequences; slot 0 holds the real token, the others the mask.

    logits: [B, N, L-1, V] the drafter's. labels: [B, N, L-1] the tokens that came. teacher:
    [B, N, L-1, V] the target's logits for the same places.
    """

    logits: Tensor
    labels: Tensor
    teacher: Tensor


def run_blocks(model: DFlashModel, target: Kimi, lesson: Lesson, anchors: Tensor) -> BlockBatch:
    """Draft from `anchors` [B, N] of a lesson in one pass, every block blind to the others.

    An anchor is the root's position; its block sees the context strictly before it.
    """
    config, tokens, device = model.config, lesson.tokens, lesson.tokens.device
    (batch, length), count, size = tokens.shape, anchors.shape[1], config.block_size
    places = anchors.unsqueeze(2) + torch.arange(size, device=device)  # [B, N, L]
    positions = torch.arange(length, device=device)
    dtype = target.embedding.dtype
    past = model.context_keys_values(lesson.taps.flatten(0, 1).to(dtype), positions.repeat(batch))
    context = [
        (torch.unflatten(key, 0, (batch, length)), torch.unflatten(value, 0, (batch, length)))
        for key, value in past
    ]
    block_tokens = torch.full_like(places, config.mask_token_id)
    block_tokens[:, :, 0] = tokens.gather(1, anchors)
    where = BlockPositions(
        positions.expand(batch, -1),
        places.flatten(1),
        anchors.repeat_interleave(size, 1),
        torch.arange(count, device=device).repeat_interleave(size).expand(batch, -1),
    )
    hidden = model.hidden(target.embedding[block_tokens.flatten(1)], context, where)
    masked = hidden.view(batch, count, size, -1)[:, :, 1:].flatten(0, 2)
    labels = tokens.gather(1, places.flatten(1)).view(batch, count, size)[:, :, 1:]
    shape = (batch, count, size - 1, -1)
    with torch.no_grad():  # the target's distribution at a slot stands at the row before it
        sequence = torch.arange(batch, device=device).view(-1, 1, 1)
        rows = (sequence * length + places[:, :, :-1]).flatten()
        teacher = target.logits(target.norm(lesson.hidden.flatten(0, 1).to(dtype)), rows)
    return BlockBatch(linear(masked, target.head).view(shape), labels, teacher.view(shape))


def block_loss(blocks: BlockBatch, gamma: float, distil: float) -> Tensor:
    """Cross-entropy with the tokens and with the target's distribution, slot k weighing
    exp(-(k - 1) / gamma), normalised by the weights' sum.
    """
    log_probs = torch.log_softmax(blocks.logits, -1)
    hard = -log_probs.gather(-1, blocks.labels.unsqueeze(-1)).squeeze(-1)
    soft = -(torch.softmax(blocks.teacher, -1) * log_probs).sum(-1)
    slots = blocks.labels.shape[-1]
    weights = torch.exp(-torch.arange(slots, device=hard.device) / gamma)
    losses = (1.0 - distil) * hard + distil * soft
    return (losses * weights).sum() / (weights.sum() * blocks.labels[..., 0].numel())


def right_guesses(blocks: BlockBatch) -> Tensor:
    """[B * N, L-1] bool: whether the drafter's first guess is the target's own."""
    return (blocks.logits.argmax(-1) == blocks.teacher.argmax(-1)).flatten(0, 1)
