"""The DeepSeek-V3 / Kimi-K2 network in NumPy float64, written from the maths alone.

It shares no code and no shortcut with the engine: attention is not absorbed (each head has its
own K and V), there is no cache, and every reduction is whatever NumPy does in float64. It is
slow, and meant for tiny checkpoints.

Letters used in the shape comments:
    T tokens, H hidden, N layers, V vocabulary, h heads, E routed experts, k experts per token,
    R kv_lora_rank, Q q_lora_rank, dn qk_nope_head_dim, dr qk_rope_head_dim, dv v_head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Config = Mapping[str, Any]  # the dict of config.json (of its text_config, where there is one)
Weights = Mapping[str, Array]  # Hugging Face names without the `language_model.` prefix

INT4_GROUP = 32
FP8_BLOCK = 128


class Output(NamedTuple):
    logits: F64  # [T, V]
    hidden: F64  # [N, T, H]: the residual stream after each layer, before the final norm


# ---------------------------------------------------------------------------------- weights


def round_to_bf16(x: Array) -> Array:
    """float32 -> the nearest bfloat16 (ties to even), still held in float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    half = np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))
    rounded = (bits + half) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def unpack_int4(packed: Array) -> Array:
    """int32 [out, in/8] -> integers in [-8, 7], [out, in]. Column c is nibble c%8 of word c//8."""
    words = np.ascontiguousarray(packed, dtype=np.int32).view(np.uint32)
    shifts = np.arange(8, dtype=np.uint32) * np.uint32(4)
    nibbles = (words[:, :, None] >> shifts) & np.uint32(0xF)  # [out, in/8, 8]
    return nibbles.reshape(words.shape[0], -1).astype(np.int64) - 8


def dequantize_int4(packed: Array, scale: Array, shape: Array | None = None) -> F64:
    """packed int32 [out, in/8], scale [out, in/32] -> bf16(q * scale), [out, in]."""
    q = unpack_int4(packed)
    if shape is not None and tuple(int(n) for n in shape) != q.shape:
        raise ValueError(f"weight_shape says {tuple(shape)}, weight_packed holds {q.shape}")
    if scale.shape != (q.shape[0], q.shape[1] // INT4_GROUP) or q.shape[1] % INT4_GROUP:
        raise ValueError(f"weight_scale {scale.shape} does not fit a weight {q.shape}")
    by_column = np.repeat(scale.astype(np.float64), INT4_GROUP, axis=1)  # [out, in]
    # 4-bit x 8-bit significands: the product is exact in float32, so bf16 is the only rounding.
    return round_to_bf16((q * by_column).astype(np.float32)).astype(np.float64)


def dequantize_fp8(weight: Array, scale: Array) -> F64:
    """weight [out, in] (FP8 values), scale [ceil(out/128), ceil(in/128)] -> bf16(w * scale)."""
    rows, columns = weight.shape
    by_row = np.repeat(scale.astype(np.float32), FP8_BLOCK, axis=0)[:rows]
    by_element = np.repeat(by_row, FP8_BLOCK, axis=1)[:, :columns]  # [out, in]
    return round_to_bf16(weight.astype(np.float32) * by_element).astype(np.float64)


def dequantize(weights: Weights, module: str) -> F64:
    """The [out, in] matrix of a linear module in whichever form the checkpoint stores it."""
    plain, packed = weights.get(f"{module}.weight"), weights.get(f"{module}.weight_packed")
    if (plain is None) == (packed is None):
        raise ValueError(f"{module}: need exactly one of weight and weight_packed")
    if packed is not None:
        scale = weights[f"{module}.weight_scale"]
        return dequantize_int4(packed, scale, weights.get(f"{module}.weight_shape"))
    assert plain is not None
    block_scale = weights.get(f"{module}.weight_scale_inv")
    return plain.astype(np.float64) if block_scale is None else dequantize_fp8(plain, block_scale)


def linear(x: F64, weights: Weights, module: str) -> F64:
    """x [T, in] -> [T, out], with a bias if the checkpoint has one."""
    y = x @ dequantize(weights, module).T
    bias = weights.get(f"{module}.bias")
    return y if bias is None else y + bias.astype(np.float64)


# ------------------------------------------------------------------------------ elementwise


def rms_norm(x: F64, weight: Array, eps: float) -> F64:
    """x [..., D] / sqrt(mean of squares + eps) * weight [D]."""
    size: F64 = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)  # [..., 1]
    return x / size * weight.astype(np.float64)


def sigmoid(x: F64) -> F64:
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x: F64) -> F64:
    return x * sigmoid(x)


def softmax(scores: F64) -> F64:
    """Over the last axis; -inf means not visible; every row must see something."""
    e: F64 = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: F64 = e.sum(axis=-1, keepdims=True)
    return e / total


def swiglu(x: F64, weights: Weights, module: str) -> F64:
    """down(silu(gate(x)) * up(x)), [T, H] -> [T, H]."""
    gate = silu(linear(x, weights, f"{module}.gate_proj"))
    return linear(gate * linear(x, weights, f"{module}.up_proj"), weights, f"{module}.down_proj")


# ------------------------------------------------------------------------------------- RoPE


class Rope(NamedTuple):
    theta: float
    yarn: bool
    factor: float = 1.0
    original: int = 0  # original_max_position_embeddings
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None  # an explicit multiplier of cos and sin


def rope_settings(config: Config) -> Rope:
    """From `rope_theta` + `rope_scaling` or from transformers v5's `rope_parameters`."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return Rope(theta, yarn=False)
    if kind != "yarn":
        raise ValueError(f"unknown RoPE type {kind!r}")
    original = given.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return Rope(
        theta,
        yarn=True,
        factor=float(given["factor"]),
        original=int(original),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        mscale=float(given.get("mscale") or 1.0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0.0),
        attention_factor=given.get("attention_factor"),
    )


def yarn_range(rope: Rope, dim: int) -> tuple[int, int]:
    """(low, high): frequencies below `low` are kept, those above `high` are interpolated."""

    def index_turning(turns: float) -> float:
        """The (real) frequency index that makes `turns` turns over the original context."""
        return dim * math.log(rope.original / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    low = max(math.floor(index_turning(rope.beta_fast)), 0)
    high = min(math.ceil(index_turning(rope.beta_slow)), dim - 1)
    return low, high


def inverse_frequencies(rope: Rope, dim: int) -> F64:
    """Radians per position of each of the dim/2 pairs, [dim/2]."""
    index = np.arange(dim // 2, dtype=np.float64)
    kept = rope.theta ** (-2.0 * index / dim)
    if not rope.yarn:
        return kept
    low, high = yarn_range(rope, dim)
    width = high - low if high != low else 0.001
    ramp = np.clip((index - low) / width, 0.0, 1.0)
    return kept * (1.0 - ramp) + kept / rope.factor * ramp


def yarn_g(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rope_amplitude(rope: Rope) -> float:
    """What cos and sin are multiplied by: 1.0 wherever mscale = mscale_all_dim."""
    if not rope.yarn:
        return 1.0
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    return yarn_g(rope.factor, rope.mscale) / yarn_g(rope.factor, rope.mscale_all_dim)


def softmax_scale(config: Config) -> float:
    """(dn + dr)^-0.5 * g(mscale_all_dim)^2; without YaRN there is no g."""
    rope = rope_settings(config)
    g = yarn_g(rope.factor, rope.mscale_all_dim) if rope.yarn else 1.0
    return g**2 / math.sqrt(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])


def rope_interleaved(x: F64, positions: Array, rope: Rope) -> F64:
    """Rotate the pairs (0,1), (2,3), ... of x [T, h, dr]; positions [T]."""
    turns = positions.astype(np.float64)[:, None] * inverse_frequencies(rope, x.shape[-1])
    z = x[..., 0::2] + 1j * x[..., 1::2]  # [T, h, dr/2]: a pair is one complex number
    z = z * np.exp(1j * turns)[:, None, :] * rope_amplitude(rope)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


# -------------------------------------------------------------------------------- attention


def queries(config: Config, weights: Weights, module: str, x: F64) -> F64:
    """x [T, H] -> [T, h, dn + dr], not yet rotated."""
    if config.get("q_lora_rank") is None:
        q = linear(x, weights, f"{module}.q_proj")
    else:
        low = linear(x, weights, f"{module}.q_a_proj")  # [T, Q]
        low = rms_norm(low, weights[f"{module}.q_a_layernorm.weight"], config["rms_norm_eps"])
        q = linear(low, weights, f"{module}.q_b_proj")
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return q.reshape(x.shape[0], config["num_attention_heads"], width)


def keys_and_values(
    config: Config, weights: Weights, module: str, x: F64, positions: Array
) -> tuple[F64, F64]:
    """x [T, H] -> K [T, h, dn + dr] (rotated) and V [T, h, dv], one pair for each head."""
    rank, nope, heads = (
        config["kv_lora_rank"],
        config["qk_nope_head_dim"],
        config["num_attention_heads"],
    )
    joint = linear(x, weights, f"{module}.kv_a_proj_with_mqa")  # [T, R + dr]
    norm = weights[f"{module}.kv_a_layernorm.weight"]
    latent = rms_norm(joint[:, :rank], norm, config["rms_norm_eps"])  # [T, R]
    k_rope = rope_interleaved(joint[:, None, rank:], positions, rope_settings(config))  # [T, 1, dr]
    both = linear(latent, weights, f"{module}.kv_b_proj").reshape(x.shape[0], heads, -1)
    k_rope_of_each = np.broadcast_to(k_rope, (x.shape[0], heads, k_rope.shape[-1]))
    return np.concatenate([both[..., :nope], k_rope_of_each], axis=-1), both[..., nope:]


def attention(
    config: Config, weights: Weights, module: str, x: F64, positions: Array, visible: Bool
) -> F64:
    """x [T, H] -> [T, H]; visible [T, T]: may row q look at row k?"""
    nope = config["qk_nope_head_dim"]
    q = queries(config, weights, module, x)
    rotated = rope_interleaved(q[..., nope:], positions, rope_settings(config))
    q = np.concatenate([q[..., :nope], rotated], axis=-1)  # [T, h, dn + dr]
    k, v = keys_and_values(config, weights, module, x, positions)
    scores = np.einsum("qhd,khd->hqk", q, k) * softmax_scale(config)
    probabilities = softmax(np.where(visible, scores, -np.inf))  # [h, T, T]
    mixed = np.einsum("hqk,khd->qhd", probabilities, v)  # [T, h, dv]
    return linear(mixed.reshape(x.shape[0], -1), weights, f"{module}.o_proj")


# ---------------------------------------------------------------------------------- experts


def route(config: Config, logits: F64, bias: Array) -> tuple[Array, F64]:
    """Router logits [T, E] -> chosen experts [T, k], best first, and their weights [T, k].

    The bias takes part in the choice alone. Equal values: the smaller expert index first.
    """
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        raise ValueError(f"scoring_func {config['scoring_func']!r} is not of this family")
    affinity = sigmoid(logits)
    choice = affinity + bias.astype(np.float64)  # [T, E]
    tokens, experts = choice.shape
    groups, kept = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    if groups > 1:
        by_group = choice.reshape(tokens, groups, experts // groups)
        group_score = np.sort(by_group, axis=-1)[..., -2:].sum(axis=-1)  # its two best, [T, groups]
        best = np.argsort(-group_score, axis=-1, kind="stable")[:, :kept]
        alive = np.zeros((tokens, groups), dtype=bool)
        np.put_along_axis(alive, best, True, axis=-1)
        choice = np.where(alive[:, :, None], by_group, -np.inf).reshape(tokens, experts)
    top = np.argsort(-choice, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
    weight = np.take_along_axis(affinity, top, axis=-1)
    if config.get("norm_topk_prob", True):
        weight = weight / (weight.sum(axis=-1, keepdims=True) + 1e-20)
    return top, weight * float(config.get("routed_scaling_factor", 1.0))


def mixture(config: Config, weights: Weights, module: str, x: F64) -> F64:
    """Routed experts in their weights' proportion, plus the shared expert as it is; [T, H]."""
    logits = x @ weights[f"{module}.gate.weight"].astype(np.float64).T  # [T, E]
    top, share = route(config, logits, weights[f"{module}.gate.e_score_correction_bias"])
    out = np.zeros_like(x)
    for expert in np.unique(top):
        token, slot = np.nonzero(top == expert)
        out[token] += share[token, slot, None] * swiglu(
            x[token], weights, f"{module}.experts.{expert}"
        )
    if config.get("n_shared_experts"):
        out += swiglu(x, weights, f"{module}.shared_experts")
    return out


def is_sparse(config: Config, layer: int) -> bool:
    first = int(config.get("first_k_dense_replace", 0))
    return layer >= first and layer % int(config.get("moe_layer_freq", 1)) == 0


# ---------------------------------------------------------------------------------- forward


def forward(
    config: Config,
    weights: Weights,
    token_ids: Sequence[int] | Array,
    positions: Array | None = None,
    visible: Bool | None = None,
) -> Output:
    """token_ids [T] -> logits [T, V] and the hidden states after each layer [N, T, H].

    By default row t is at position t and sees rows 0..t. A tree is verified by giving positions
    [T] (siblings share one) and visible [T, T] (a row, its ancestors and its context).
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if positions is None:
        positions = np.arange(len(ids))
    if visible is None:
        visible = np.tri(len(ids), dtype=bool)
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][ids].astype(np.float64)  # [T, H]
    taps: list[F64] = []
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        x = x + attention(config, weights, f"{name}.self_attn", normed, positions, visible)
        normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        if is_sparse(config, layer):
            x = x + mixture(config, weights, f"{name}.mlp", normed)
        else:
            x = x + swiglu(normed, weights, f"{name}.mlp")
        taps.append(x)
    final = rms_norm(x, weights["model.norm.weight"], eps)
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return Output(final @ dequantize(weights, head).T, np.stack(taps))
