"""The DFlash network (z-lab's, arXiv 2602.06036): Qwen3-style layers over injected target states.

One pass over a block [root, MASK, ...] gives a distribution for every masked slot. Keys and values
of the context depend on the target's taps alone, so they are computed once a token, at commit, and
kept. The same functions serve inference and training; training only brings other masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.config import DrafterConfig, DraftMask
from kdtree_engine.kernels.dflash_attention import dflash_attention, dflash_attention_paged
from kdtree_engine.kernels.linear import ColumnBlocks, DenseWeight, linear, product
from kdtree_engine.kernels.rope import Angles, RopeTable, rotate_half
from kdtree_engine.model.layers import GatedMLP, Norm

KeysValues = tuple[Tensor, Tensor]  # each [B, T, kv_heads, head_dim]
# Layer, query [B, L, heads, hd], the blocks' own keys and values, what the layer's rows see.
Attend = Callable[[int, Tensor, KeysValues, DraftMask], Tensor]


@dataclass(frozen=True, eq=False)
class BlockPositions:
    """Places of context keys and block rows, all int64.

    context: [B, S] positions of the context keys. rows: [B, L] positions of the block rows.
    anchors: [B, L] the position of each row's root. blocks: [B, L] which block a row belongs to.
    """

    context: Tensor
    rows: Tensor
    anchors: Tensor
    blocks: Tensor


@dataclass(frozen=True, eq=False)
class DFlashLayer:
    """Attention over [context ; block], then a gated MLP, each behind a norm and a residual."""

    input_norm: Norm
    query: DenseWeight  # H -> heads * hd
    key_value: DenseWeight  # H -> 2 * kv_heads * hd, keys first
    query_norm: Norm  # over hd
    key_norm: Norm
    output: DenseWeight  # heads * hd -> H
    mlp_norm: Norm
    mlp: GatedMLP

    def keys_values(self, x: Tensor, config: DrafterConfig, angles: Angles) -> KeysValues:
        """Rotated keys and values [R, kv_heads, hd] of x [R, H]."""
        both = linear(x, self.key_value).view(-1, 2, config.num_kv_heads, config.head_dim)
        return rotate_half(self.key_norm(both[:, 0]), angles), both[:, 1]


@dataclass(frozen=True, eq=False)
class DFlashModel:
    """The drafter's weights.

    embedding [V, H] and head (H -> draft vocabulary): None where they are the target's. tokens
    [draft vocabulary] int64, rising: the token of each of the head's outputs, None where they are
    the vocabulary.
    """

    config: DrafterConfig
    fc: DenseWeight  # n * H -> H
    hidden_norm: Norm
    layers: tuple[DFlashLayer, ...]
    norm: Norm
    rope: RopeTable
    embedding: Tensor | None = None
    head: DenseWeight | None = None
    tokens: Tensor | None = None

    def parameters(self) -> list[Tensor]:
        """Every weight of the layers, for training, which runs on column blocks."""
        found = [_blocks(self.fc), self.hidden_norm.weight, self.norm.weight]
        for layer in self.layers:
            found += [layer.input_norm.weight, layer.query_norm.weight, layer.key_norm.weight]
            found += [layer.mlp_norm.weight, _blocks(layer.query), _blocks(layer.key_value)]
            found += [_blocks(layer.output), _blocks(layer.mlp.gate_up), _blocks(layer.mlp.down)]
        return found

    def context_keys_values(self, taps: Tensor, positions: Tensor) -> list[KeysValues]:
        """Per layer, keys and values [R, kv_heads, hd] of committed rows: taps [R, n * H]."""
        injected = self.hidden_norm(linear(taps, self.fc))
        angles = self.rope.at(positions).over_heads()
        return [layer.keys_values(injected, self.config, angles) for layer in self.layers]

    def hidden(self, x: Tensor, context: Sequence[KeysValues], places: BlockPositions) -> Tensor:
        """Final hidden states [B, L, H] of block embeddings x [B, L, H], ready for the head.

        context: per layer, keys and values [B, S, kv_heads, hd]. For training: any number of
        blocks of one sequence in a row of x, under a mask.
        """
        masks: dict[DraftMask, Tensor] = {}

        def attend(index: int, query: Tensor, own: KeysValues, mask: DraftMask) -> Tensor:
            if mask not in masks:
                masks[mask] = visible(places, mask)
            return dflash_attention(query, context[index], own, masks[mask])

        return self._through(x, places.rows, attend)

    def draft_hidden(
        self,
        x: Tensor,
        positions: Tensor,
        draft: Sequence[Tensor],
        contexts: Tensor,
        pages: Tensor,
    ) -> Tensor:
        """The same for inference: one block x [B, L, H] a request, its context in the cache.

        positions: [B, L] int64. draft: per layer, the cache's [pages, 64, 2, kv_heads, hd].
        contexts: [B] int32, cached tokens. pages: [B, P] int32, each request's pages.
        """

        def attend(index: int, query: Tensor, own: KeysValues, mask: DraftMask) -> Tensor:
            keys, values = own
            return dflash_attention_paged(
                query, keys, values, draft[index], contexts, pages, mask.window, mask.sliding,
                mask.causal,
            )  # fmt: skip

        return self._through(x, positions, attend)

    def _through(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All layers over blocks x [B, L, H] whose rows stand at positions [B, L]."""
        config = self.config
        batch, length, width = x.shape
        angles = self.rope.at(positions.flatten()).over_heads()
        rows = x.reshape(-1, width).contiguous()
        normed = self.layers[0].input_norm(rows)
        # As in the target, every addition is one operator with the norm that follows it.
        following = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for index, (layer, mask) in enumerate(zip(self.layers, config.masks, strict=True)):
            query = linear(normed, layer.query).view(-1, config.num_heads, config.head_dim)
            query = rotate_half(layer.query_norm(query), angles)
            key, value = layer.keys_values(normed, config, angles)
            query, key, value = (
                torch.unflatten(part, 0, (batch, length)) for part in (query, key, value)
            )
            mixed = attend(index, query, (key, value), mask)
            output = product(mixed.reshape(batch * length, -1), layer.output)
            rows, normed = layer.mlp_norm.after(output, rows)
            rows, normed = layer.mlp.add(normed, rows, following[index])
        return normed.view(batch, length, width)


def visible(places: BlockPositions, mask: DraftMask) -> Tensor:
    """[B, L, S + L] bool: which context keys, then which rows, does each row of a layer see?

    The context strictly before its root, and its own block, within the layer's limits.
    """
    past = places.context.unsqueeze(1)  # [B, 1, S]
    anchors, rows = places.anchors.unsqueeze(2), places.rows.unsqueeze(2)  # [B, L, 1]
    context = past < anchors
    own = places.blocks.unsqueeze(2) == places.blocks.unsqueeze(1)
    distance = rows - places.rows.unsqueeze(1)
    if mask.window is not None:
        context &= past >= anchors - mask.window
    if mask.causal:
        own &= distance >= 0
    if mask.sliding is not None:
        own &= distance.abs() < mask.sliding
        context &= rows - past < mask.sliding
    return torch.cat((context, own), 2)


def _blocks(weight: DenseWeight) -> Tensor:
    assert isinstance(weight, ColumnBlocks), "weights laid out for kernels cannot be trained"
    return weight.blocks
