"""The DFlash drafter in NumPy float64: one pass over a block [root, MASK, MASK, ...].

Context enters through the keys and values of every layer; only the block's rows move on.

Letters used in the shape comments:
    T context tokens, L block slots, H hidden, n taps, h query heads, g key/value heads,
    D head_dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .model import (
    F64,
    Array,
    Bool,
    Config,
    Rope,
    Weights,
    inverse_frequencies,
    linear,
    rms_norm,
    rope_amplitude,
    rope_settings,
    softmax,
    swiglu,
)


def canonical(weights: Weights) -> dict[str, Array]:
    """z-lab files have no `model.` prefix; other writers add one."""
    return {name.removeprefix("model."): value for name, value in weights.items()}


def flattened(config: Config) -> Config:
    """A config of the speculators library in the flat form that the functions here read.

    Its auxiliary id k is the hidden state before layer k, the output of layer k - 1. Full layers
    look both ways; a window counts from the anchor (`visible_keys` without window_of_each_slot).
    """
    inner = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [k - 1 for k in config["aux_hidden_state_layer_ids"]],
    }
    kept = ("block_size", "sliding_window_non_causal", "sample_from_anchor")
    outer = {name: config[name] for name in kept}
    return {**config["transformer_layer_config"], **outer, "dflash_config": inner}


def option(config: Config, name: str) -> Any:
    """A field that some writers put at top level and others inside dflash_config."""
    inner = config.get("dflash_config") or {}
    return config[name] if config.get(name) is not None else inner.get(name)


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def layer_kind(config: Config, layer: int) -> str:
    kinds = config.get("layer_types")
    return str(kinds[layer]) if kinds else "full_attention"


def rope_half_split(x: F64, positions: Array, rope: Rope, amplitude: float) -> F64:
    """Rotate the pairs (i, i + D/2) of x [rows, heads, D]; positions [rows]."""
    half = x.shape[-1] // 2
    angle = positions.astype(np.float64)[:, None] * inverse_frequencies(rope, x.shape[-1])
    cos = amplitude * np.cos(angle)[:, None, :]  # [rows, 1, D/2]
    sin = amplitude * np.sin(angle)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def visible_keys(
    config: Config,
    layer: int,
    context_positions: Array,
    block: int,
    start: int,
    window_of_each_slot: bool = False,
) -> Bool:
    """[L, T + L]: which context tokens, then which slots, does each slot see?

    A full_attention layer sees all of the context and all of the block. A sliding_attention
    layer sees the last `sliding_window` context tokens (positions >= start - window) and, unless
    is_causal or sliding_window_non_causal says otherwise, only the slots up to its own. With
    `window_of_each_slot` the window ends at the slot itself (q - window < k, and in a block that is
    not causal k < q + window): the rule some trainers use.
    """
    slots = start + np.arange(block)
    keys = np.concatenate([np.asarray(context_positions, dtype=np.int64), slots])  # [T + L]
    in_block = np.arange(len(keys)) >= len(context_positions)
    sliding = layer_kind(config, layer) == "sliding_attention"
    causal = option(config, "is_causal")
    if causal is None:
        causal = sliding and not option(config, "sliding_window_non_causal")
    causal = bool(causal)
    seen = np.ones((block, len(keys)), dtype=bool)
    if causal:
        seen &= keys[None, :] <= slots[:, None]  # all of the context comes before slot 0
    if sliding and window_of_each_slot:
        seen &= np.abs(slots[:, None] - keys[None, :]) < int(config["sliding_window"])
    elif sliding:
        seen &= in_block | (keys >= start - int(config["sliding_window"]))
    return seen


def attention(
    config: Config,
    weights: Weights,
    module: str,
    x: F64,
    context: F64,
    positions: Array,
    seen: Bool,
    amplitude: float,
) -> F64:
    """x [L, H] (normed block), context [T, H], positions [T + L], seen [L, T + L] -> [L, H]."""
    dim, eps, rope = head_dim(config), config["rms_norm_eps"], rope_settings(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    both = np.concatenate([context, x])  # [T + L, H]
    q = linear(x, weights, f"{module}.q_proj").reshape(len(x), heads, dim)
    k = linear(both, weights, f"{module}.k_proj").reshape(len(both), kv_heads, dim)
    v = linear(both, weights, f"{module}.v_proj").reshape(len(both), kv_heads, dim)
    q = rms_norm(q, weights[f"{module}.q_norm.weight"], eps)
    k = rms_norm(k, weights[f"{module}.k_norm.weight"], eps)
    q = rope_half_split(q, positions[len(context) :], rope, amplitude)
    k = rope_half_split(k, positions, rope, amplitude)
    out = np.empty((len(x), heads, dim))
    for head in range(heads):
        shared = head // (heads // kv_heads)  # consecutive query heads share one K and V
        scores = q[:, head] @ k[:, shared].T * dim**-0.5  # [L, T + L]
        out[:, head] = softmax(np.where(seen, scores, -np.inf)) @ v[:, shared]
    return linear(out.reshape(len(x), -1), weights, f"{module}.o_proj")


def context_features(config: Config, weights: Weights, taps: Array) -> F64:
    """taps [T, n*H], joined in target_layer_ids' order -> hidden_norm(fc(taps)), [T, H]."""
    joined = linear(np.asarray(taps, dtype=np.float64), weights, "fc")
    return rms_norm(joined, weights["hidden_norm.weight"], config["rms_norm_eps"])


def draft(
    config: Config,
    weights: Weights,
    taps: Array,
    context_positions: Array,
    block_embeddings: Array,
    start: int,
    *,
    amplitude: float | None = None,
    window_of_each_slot: bool = False,
) -> F64:
    """One drafting pass: the block's hidden states after the final norm, [L, H].

    taps [T, n*H] and context_positions [T]: the committed tokens before the root.
    block_embeddings [L, H]: the target's raw embeddings of [root, MASK, ...]; slot j is at
    position start + j. Row j >= 1, through the target's lm_head, predicts the token at start + j.
    amplitude: what YaRN multiplies cos and sin by, if not the value the config's formula gives.
    """
    weights = canonical(weights)
    block = len(block_embeddings)
    eps = config["rms_norm_eps"]
    if amplitude is None:
        amplitude = rope_amplitude(rope_settings(config))
    context = context_features(config, weights, taps)  # [T, H], the same for every layer
    positions = np.concatenate([np.asarray(context_positions), start + np.arange(block)])
    x = np.asarray(block_embeddings, dtype=np.float64)  # [L, H]
    x = x * float(option(config, "input_embedding_scale") or 1.0)
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        seen = visible_keys(config, layer, context_positions, block, start, window_of_each_slot)
        normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        x = x + attention(
            config, weights, f"{name}.self_attn", normed, context, positions, seen, amplitude
        )
        normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        x = x + swiglu(normed, weights, f"{name}.mlp")
    return rms_norm(x, weights["norm.weight"], eps)


def draft_logits(config: Config, hidden: F64, lm_head: Array) -> F64:
    """hidden [L, H], lm_head [V, H] -> logits of slots 1..L-1, [L - 1, V], one a position.

    With sample_from_anchor slot k guesses the token after its own position: all L slots.
    """
    logits = (
        hidden[0 if option(config, "sample_from_anchor") else 1 :] @ lm_head.astype(np.float64).T
    )
    logits = logits * float(option(config, "output_multiplier") or 1.0)
    cap = option(config, "final_logit_softcapping")
    return np.tanh(logits / cap) * cap if cap else logits


def over_vocabulary(log_probs: F64, offsets: Array, vocab: int) -> F64:
    """[rows, D] of draft ids -> [rows, vocab] of tokens, those that no id names at -inf.

    offsets [D]: the token of draft id i is i + offsets[i].
    """
    out = np.full((len(log_probs), vocab), -np.inf)
    for draft, offset in enumerate(offsets.tolist()):
        out[:, draft + offset] = log_probs[:, draft]
    return out


def default_taps(target_layers: int, count: int) -> list[int]:
    """The target's decoder layers (0-based, their outputs) that a drafter taps by default."""
    if count == 1:
        return [target_layers // 2]
    last = target_layers - 3
    return [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]
