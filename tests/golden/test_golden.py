"""The golden model against published facts and against oracles that nobody here wrote."""

from __future__ import annotations

import math

import numpy as np
import pytest

from . import dflash, model, tiny

FAMILY = {  # name: (theta, factor, beta_fast, low, high, g^2, softmax scale)
    "k2.6": (50000.0, 64.0, 32.0, 8, 20, 2.0047397, 0.14467963),
    "k2-0905": (50000.0, 64.0, 1.0, 19, 20, 2.0047397, 0.14467963),
    "k2-instruct": (50000.0, 32.0, 1.0, 19, 20, 1.8132604, 0.13086080),
    "deepseek-v3": (10000.0, 40.0, 32.0, 10, 23, 1.8738542, 0.13523378),
}


def family_config(name: str, key: str = "rope_scaling") -> dict[str, object]:
    theta, factor, beta_fast, *_ = FAMILY[name]
    yarn = {
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    head = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    if key == "rope_scaling":
        return {**head, "rope_theta": theta, key: {**yarn, "type": "yarn"}}
    return {**head, key: {**yarn, "rope_type": "yarn", "rope_theta": theta}}


# ------------------------------------------------------------------------------------- RoPE


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", FAMILY)
def test_yarn_table(name: str, key: str) -> None:
    config = family_config(name, key)
    _, factor, _, low, high, g_squared, scale = FAMILY[name]
    rope = model.rope_settings(config)
    assert model.yarn_range(rope, 64) == (low, high)
    assert model.yarn_g(factor, 1.0) ** 2 == pytest.approx(g_squared, abs=1e-7)
    assert model.softmax_scale(config) == pytest.approx(scale, abs=1e-8)
    assert model.rope_amplitude(rope) == 1.0
    inverse = model.inverse_frequencies(rope, 64)
    plain = rope.theta ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(inverse[: low + 1], plain[: low + 1], rtol=1e-15)
    np.testing.assert_allclose(inverse[high:], plain[high:] / factor, rtol=1e-15)
    inside = slice(low + 1, high)
    assert (inverse[inside] < plain[inside]).all()
    assert (inverse[inside] > plain[inside] / factor).all()


def test_without_yarn_the_scale_has_no_g() -> None:
    config = family_config("k2.6", "rope_parameters")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 50000.0}
    assert model.softmax_scale(config) == pytest.approx(192**-0.5, rel=1e-15)
    assert model.rope_settings(config).theta == 50000.0
    assert model.rope_amplitude(model.rope_settings(config)) == 1.0


def test_amplitude_follows_the_two_mscales() -> None:
    config = family_config("k2.6")
    config["rope_scaling"] = {**config["rope_scaling"], "mscale_all_dim": 0.0}  # type: ignore[dict-item]
    assert model.rope_amplitude(model.rope_settings(config)) == pytest.approx(1.4158883, abs=1e-7)
    assert model.softmax_scale(config) == pytest.approx(192**-0.5, rel=1e-15)


def test_rope_rotates_neighbouring_pairs_and_knows_only_distances() -> None:
    rope = model.Rope(theta=10.0, yarn=False)
    x = np.array([1.0, 0.0, 3.0, 2.0]).reshape(1, 1, 4)  # the pairs (1, 0) and (3, 2)
    got = model.rope_interleaved(x, np.array([3]), rope).ravel()
    cos, sin = math.cos(3 * 10**-0.5), math.sin(3 * 10**-0.5)
    expected = [math.cos(3), math.sin(3), 3 * cos - 2 * sin, 3 * sin + 2 * cos]
    np.testing.assert_allclose(got, expected, rtol=1e-14)
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 16))

    def score(at_q: int, at_k: int) -> float:
        a = model.rope_interleaved(q, np.array([at_q]), rope)
        return float((a * model.rope_interleaved(k, np.array([at_k]), rope)).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


# ------------------------------------------------------------------------------------- INT4


def test_int4_words_are_little_endian_nibbles() -> None:
    words = np.array([[0x76543210, 0xFEDCBA98]], dtype=np.uint32).view(np.int32)
    assert words[0, 1] < 0  # a negative word must not smear its sign
    np.testing.assert_array_equal(model.unpack_int4(words), [list(range(-8, 8))])
    low_then_high = np.stack([words.view(np.uint8) & 15, words.view(np.uint8) >> 4], axis=-1)
    np.testing.assert_array_equal(model.unpack_int4(words) + 8, low_then_high.reshape(1, -1))


def test_int4_value_is_rounded_to_bf16() -> None:
    words = np.full((1, 4), 0xFFFFFFFF, dtype=np.uint32).view(np.int32)  # every q is 7
    scale = np.array([[1.0078125]], dtype=np.float32)  # 1 + 2^-7, a bf16 value
    got = model.dequantize_int4(words, scale, np.array([1, 32]))
    np.testing.assert_array_equal(got, np.full((1, 32), 7.0625))  # 7.0546875 is between two bf16s


def test_int4_groups_run_along_the_input() -> None:
    weight = np.random.default_rng(1).normal(size=(3, 96)).astype(np.float32)
    packed, scale, shape = tiny.pack_int4(weight)
    assert packed.shape == (3, 12)
    assert scale.shape == (3, 3)
    got = model.dequantize({"m.weight_packed": packed, "m.weight_scale": scale}, "m")
    assert np.abs(got - weight).max() < 0.6 * scale.max()
    with pytest.raises(ValueError, match="weight_shape"):
        model.dequantize_int4(packed, scale, shape[::-1])
    with pytest.raises(ValueError, match="exactly one"):
        model.dequantize({"m.weight_packed": packed, "m.weight": weight}, "m")


def test_bf16_rounding_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(2).normal(size=4096).astype(np.float32)
    x[:2] = [1.00390625, 1.01171875]  # ties: the first goes down to even, the second up
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(model.round_to_bf16(x), expected)


def test_int4_is_compressed_tensors() -> None:
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch = pytest.importorskip("torch")
    q = np.random.default_rng(3).integers(-8, 8, size=(5, 64))
    words = library.pack_to_int32(torch.from_numpy(q.astype(np.int8)), 4).numpy()
    np.testing.assert_array_equal(model.unpack_int4(words), q)


def test_fp8_blocks_count_from_the_first_row_and_may_be_partial() -> None:
    weight = np.ones((130, 129), dtype=np.float32)
    scale = np.array([[1.0, 2.0], [4.0, 8.0]], dtype=np.float32)
    got = model.dequantize({"m.weight": weight, "m.weight_scale_inv": scale}, "m")
    assert (got[127, 127], got[127, 128], got[128, 127], got[129, 128]) == (1.0, 2.0, 4.0, 8.0)


# ----------------------------------------------------------------------------------- router


def logit(p: np.ndarray) -> np.ndarray:
    return np.asarray(np.log(p / (1 - p)))


def router(**changes: object) -> dict[str, object]:
    config = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    return {**config, "routed_scaling_factor": 2.0, **changes}


def test_bias_chooses_but_does_not_weigh() -> None:
    affinity = np.array([[0.9, 0.8, 0.2, 0.1]])
    top, weight = model.route(router(), logit(affinity), np.array([0.0, 0.0, 0.0, 5.0]))
    assert top.tolist() == [[3, 0]]
    np.testing.assert_allclose(weight, [[2 * 0.1 / 1.0, 2 * 0.9 / 1.0]], rtol=1e-12)


def test_weights_are_scaled_once_and_perhaps_not_normalised() -> None:
    affinity = np.array([[0.5, 0.25, 0.2, 0.1]])
    _, weight = model.route(router(), logit(affinity), np.zeros(4))
    assert weight.sum() == pytest.approx(2.0)
    _, weight = model.route(router(norm_topk_prob=False), logit(affinity), np.zeros(4))
    np.testing.assert_allclose(weight, [[1.0, 0.5]], rtol=1e-12)


def test_group_limit_goes_by_the_sum_of_two() -> None:
    affinity = np.array([[0.95, 0.01, 0.6, 0.5, 0.3, 0.2]])  # pairs: 0.96, 1.1, 0.5
    top, _ = model.route(router(n_group=3), logit(affinity), np.zeros(6))
    assert top.tolist() == [[2, 3]]
    top, _ = model.route(router(n_group=3, topk_group=2), logit(affinity), np.zeros(6))
    assert top.tolist() == [[0, 2]]


def test_masked_groups_lose_even_to_negative_choices() -> None:
    affinity = np.array([[0.5, 0.4, 0.3, 0.2]])
    bias = np.array([-2.0, -2.0, -4.0, -4.0])  # a mask of 0.0 would let the second group win
    top, _ = model.route(router(n_group=2), logit(affinity), bias)
    assert top.tolist() == [[0, 1]]


def test_ties_go_to_the_smaller_index() -> None:
    top, _ = model.route(router(), np.zeros((1, 6)), np.zeros(6))
    assert top.tolist() == [[0, 1]]


def test_other_score_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="softmax"):
        model.route(router(scoring_func="softmax"), np.zeros((1, 4)), np.zeros(4))


def test_dense_layers_come_first() -> None:
    config = {"first_k_dense_replace": 3, "moe_layer_freq": 2}
    assert [model.is_sparse(config, n) for n in range(6)] == [False] * 4 + [True, False]


# ---------------------------------------------------------------------------------- forward


def test_a_row_depends_on_its_prefix_alone_and_taps_are_layer_outputs() -> None:
    config = tiny.target_config()
    weights = tiny.target_weights(config)
    ids = np.random.default_rng(4).integers(0, config["vocab_size"], size=12)
    whole, part = model.forward(config, weights, ids), model.forward(config, weights, ids[:7])
    np.testing.assert_allclose(whole.logits[:7], part.logits, rtol=0, atol=1e-10)
    assert whole.hidden.shape == (4, 12, 64)
    final = model.rms_norm(whole.hidden[-1], weights["model.norm.weight"], 1e-6)
    np.testing.assert_allclose(final @ weights["lm_head.weight"].T, whole.logits, atol=1e-10)
    shorter = model.forward({**config, "num_hidden_layers": 2}, weights, ids)
    np.testing.assert_array_equal(shorter.hidden, whole.hidden[:2])


def test_a_tree_row_equals_the_plain_run_along_its_path() -> None:
    config = tiny.target_config()
    weights = tiny.target_weights(config)
    context, nodes, parents = [5, 9, 77, 3], [8, 20, 21, 30, 31], [-1, 0, 0, 1, 2]
    start, total = len(context), len(context) + len(nodes)
    visible, positions = np.tri(total, dtype=bool), np.arange(total)
    for i, parent in enumerate(parents):
        row = visible[start + parent].copy() if i else np.arange(total) < start
        row[start + i] = True
        visible[start + i] = row
        positions[start + i] = positions[start + parent] + 1 if i else start
    tree = model.forward(config, weights, context + nodes, positions, visible)
    for path in ([0, 1, 3], [0, 2, 4]):
        plain = model.forward(config, weights, context + [nodes[i] for i in path])
        rows = [start + i for i in path]
        np.testing.assert_allclose(tree.logits[rows], plain.logits[start:], atol=1e-10)


def test_absorbed_attention_is_the_same_number() -> None:
    config = tiny.target_config()
    weights, name = tiny.target_weights(config), "model.layers.1.self_attn"
    x = np.random.default_rng(5).normal(size=(9, 64))
    positions, visible = np.arange(9), np.tri(9, dtype=bool)
    explicit = model.attention(config, weights, name, x, positions, visible)
    rope, eps = model.rope_settings(config), config["rms_norm_eps"]
    joint = x @ weights[f"{name}.kv_a_proj_with_mqa.weight"].T
    latent = model.rms_norm(joint[:, :48], weights[f"{name}.kv_a_layernorm.weight"], eps)
    k_rope = model.rope_interleaved(joint[:, None, 48:], positions, rope)[:, 0]
    per_head = weights[f"{name}.kv_b_proj.weight"].astype(np.float64).reshape(4, 24 + 20, 48)
    q = model.queries(config, weights, name, x)
    q_rope = model.rope_interleaved(q[..., 24:], positions, rope)
    mixed = np.empty((9, 4, 20))
    for h in range(4):
        scores = q[:, h, :24] @ per_head[h, :24] @ latent.T + q_rope[:, h] @ k_rope.T
        scores = np.where(visible, scores * model.softmax_scale(config), -np.inf)
        mixed[:, h] = model.softmax(scores) @ latent @ per_head[h, 24:].T
    absorbed = mixed.reshape(9, -1) @ weights[f"{name}.o_proj.weight"].T
    np.testing.assert_allclose(absorbed, explicit, atol=1e-12)


def test_packed_experts_give_what_their_dense_values_give() -> None:
    config = tiny.target_config()
    packed = tiny.with_int4_experts(tiny.target_weights(config))
    dense = {n: v for n, v in packed.items() if ".mlp.experts." not in n}
    for name in packed:
        if name.endswith("_packed"):
            module = name.removesuffix(".weight_packed")
            dense[f"{module}.weight"] = model.dequantize(packed, module)
    a, b = (model.forward(config, w, [1, 2, 3, 4]) for w in (packed, dense))
    np.testing.assert_array_equal(a.logits, b.logits)


# ---------------------------------------------------------------------------------- drafter


def drafter_inputs(context: int, block: int, seed: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(context, 2 * 64)), rng.normal(size=(block, 64))


def test_which_keys_a_slot_sees() -> None:
    config = tiny.drafter_config(
        layer_types=["full_attention", "sliding_attention"], sliding_window=3
    )
    full = dflash.visible_keys(config, 0, np.arange(6), 4, 6)
    assert full.all()
    sliding = dflash.visible_keys(config, 1, np.arange(6), 4, 6)
    assert sliding[:, :6].tolist() == [[False] * 3 + [True] * 3] * 4
    np.testing.assert_array_equal(sliding[:, 6:], np.tri(4, dtype=bool))
    moving = dflash.visible_keys(config, 1, np.arange(6), 4, 6, window_of_each_slot=True)
    assert moving.sum(axis=1).tolist() == [3, 3, 3, 3]
    assert moving[0].nonzero()[0].tolist() == [4, 5, 6]
    free = dflash.visible_keys({**config, "is_causal": False}, 1, np.arange(6), 4, 6)
    assert free[:, 6:].all()


def test_block_is_bidirectional_and_context_order_is_in_the_positions() -> None:
    config = tiny.drafter_config()
    weights = tiny.drafter_weights(config)
    taps, block = drafter_inputs(7, 5)
    base = dflash.draft(config, weights, taps, np.arange(7), block, 7)
    changed = block.copy()
    changed[-1] += 1.0
    assert (
        np.abs(dflash.draft(config, weights, taps, np.arange(7), changed, 7) - base)[1].max() > 0.01
    )
    order = np.random.default_rng(7).permutation(7)
    same = dflash.draft(config, weights, taps[order], np.arange(7)[order], block, 7)
    np.testing.assert_allclose(same, base, atol=1e-12)
    later = dflash.draft(config, weights, taps, 90 + np.arange(7), block, 97)
    np.testing.assert_allclose(later, base, atol=1e-10)  # only distances count
    prefixed = {f"model.{name}": value for name, value in weights.items()}
    again = dflash.draft(config, prefixed, taps, np.arange(7), block, 7)
    np.testing.assert_array_equal(again, base)


def test_yarn_amplitude_is_a_knob() -> None:
    yarn = {**tiny.YARN, "factor": 64.0}
    config = tiny.drafter_config(rope_scaling=yarn)
    weights = tiny.drafter_weights(config)
    taps, block = drafter_inputs(7, 5)
    by_formula = dflash.draft(config, weights, taps, np.arange(7), block, 7)
    one = dflash.draft(config, weights, taps, np.arange(7), block, 7, amplitude=1.0)
    np.testing.assert_array_equal(by_formula, one)
    other = dflash.draft(config, weights, taps, np.arange(7), block, 7, amplitude=1.4158883)
    assert np.abs(other - one).max() > 0.01
    config["rope_scaling"] = {**yarn, "attention_factor": 1.4158883}
    stated = dflash.draft(config, weights, taps, np.arange(7), block, 7)
    np.testing.assert_array_equal(stated, other)


def test_default_taps() -> None:
    assert dflash.default_taps(61, 6) == [1, 12, 24, 35, 47, 58]
    assert dflash.default_taps(61, 1) == [30]
