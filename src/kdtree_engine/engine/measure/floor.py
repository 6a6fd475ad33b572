"""The least time that a step can take: bytes that must be read once, and operations.

Every operator takes the longer of its bytes at the bandwidth of a copy and its operations at the
rate of a large matrix product; operators follow one another. Activations, norms' weights and the
rows of the embedding are left out: together they are under a thousandth of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kdtree_engine.config import DrafterConfig, ModelConfig

INT4_BYTES = 0.5 + 2 / 32  # of one weight: a nibble, and a bf16 scale for each group of 32
DENSE_BYTES = 2.0  # bf16


@dataclass(frozen=True)
class Work:
    """What one operator must read (bytes) and compute (operations, a multiply-add is two)."""

    bytes: float
    operations: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)


@dataclass(frozen=True)
class Step:
    """rows of all requests together, of one context length each; distinct: experts hit per layer
    with routed experts, in order.
    """

    rows: int
    requests: int
    context: int
    distinct: Sequence[float]


def step_work(config: ModelConfig, step: Step) -> list[tuple[str, Work]]:
    """Operator name and work of everything one step runs, in order; a name comes once a layer."""
    found: list[tuple[str, Work]] = []
    distinct = iter(step.distinct)
    for layer in range(config.num_layers):
        found += _attention(config, step)
        if not config.is_moe_layer(layer):
            found.append(("dense_mlp", _dense(3 * config.intermediate_size, config, step)))
            continue
        shared = 3 * config.num_shared_experts * config.moe_intermediate_size
        found.append(("router", _dense(config.num_experts, config, step)))
        found.append(("shared_expert", _dense(shared, config, step)))
        hit = next(distinct)
        found.append(("experts_up", _experts(2, hit, config, step)))
        found.append(("experts_down", _experts(1, hit, config, step)))
    assert next(distinct, None) is None, "more layers of experts counted than there are"
    found.append(("head", _dense(config.vocab_size, config, step)))
    return found


def drafter_work(drafter: DrafterConfig, target: ModelConfig, step: Step) -> list[tuple[str, Work]]:
    """The drafter's part of the step, its weights whole: it takes in what was committed, and where
    there is a tree it drafts one block a request. The target's head is read once more for it.
    """
    hidden, dim = drafter.hidden_size, drafter.head_dim
    keys = 2 * drafter.num_kv_heads * dim
    depth = min(drafter.horizon, step.rows // step.requests - 1)
    seen = replace(step, rows=step.requests * (1 + depth))
    drafted = replace(step, rows=step.requests * drafter.block_size)

    def product(columns: int, inputs: int, rows: Step) -> Work:
        return _weights(columns * inputs, columns * inputs, rows)

    fc = product(hidden, len(drafter.tap_layers) * hidden, seen)
    injected = product(keys * drafter.num_layers, hidden, seen)
    found = [("draft_observe", fc), ("draft_observe", injected)]
    if depth == 0:
        return found
    queries = drafter.num_heads * dim
    for mask in drafter.masks:
        context = min(mask.window or step.context, mask.sliding or step.context, step.context)
        cached = step.requests * context * keys * DENSE_BYTES
        found += [
            ("draft_attention", product(2 * queries + keys, hidden, drafted)),
            ("draft_attention", Work(cached, 4.0 * drafted.rows * queries * context)),
            ("draft_mlp", product(3 * drafter.intermediate_size, hidden, drafted)),
        ]
    guessed = replace(step, rows=step.requests * drafter.horizon)
    return [*found, ("draft_head", product(target.vocab_size, hidden, guessed))]


def floor_ms(work: Sequence[tuple[str, Work]], bandwidth_tbs: float, tflops: float) -> float:
    """Milliseconds of all of it, one operator after the other."""
    seconds = sum(
        max(one.bytes / (bandwidth_tbs * 1e12), one.operations / (tflops * 1e12)) for _, one in work
    )
    return seconds * 1e3


def floor_by_operator(
    work: Sequence[tuple[str, Work]], bandwidth_tbs: float, tflops: float
) -> dict[str, float]:
    """Milliseconds of each operator over all layers."""
    found: dict[str, float] = {}
    for name, one in work:
        found[name] = found.get(name, 0.0) + floor_ms([(name, one)], bandwidth_tbs, tflops)
    return found


def total(work: Sequence[tuple[str, Work]]) -> Work:
    """The sum."""
    return sum((one for _, one in work), Work(0.0, 0.0))


def expected_distinct(experts: int, top_k: int, rows: int) -> float:
    """Distinct experts that `rows` rows hit if each chooses `top_k` of them independently."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


def _weights(count: float, per_row: float, step: Step, size: float = DENSE_BYTES) -> Work:
    """A product with a weight of `count` elements, of which each row meets `per_row`."""
    return Work(count * size, 2.0 * step.rows * per_row)


def _dense(columns: int, config: ModelConfig, step: Step) -> Work:
    """`columns` columns or rows of the hidden width."""
    count = columns * config.hidden_size
    return _weights(count, count, step)


def _experts(matrices: int, hit: float, config: ModelConfig, step: Step) -> Work:
    one = matrices * config.hidden_size * config.moe_intermediate_size
    size = INT4_BYTES if config.quantization == "int4" else DENSE_BYTES
    return _weights(hit * one, config.experts_per_token * one, step, size)


def _attention(config: ModelConfig, step: Step) -> list[tuple[str, Work]]:
    heads, lora = config.num_heads, config.kv_lora_rank
    query = heads * (config.nope_dim + config.rope_dim)
    first = config.latent_dim + (config.q_lora_rank or query)
    products = [("query_and_latent", _dense(first, config, step))]
    if config.q_lora_rank is not None:
        count = query * config.q_lora_rank
        products.append(("query_up", _weights(count, count, step)))
    key_up, value_up = heads * config.nope_dim * lora, heads * lora * config.v_dim
    # Each request's latents are read once, and every row meets all keys of its request.
    latents = Work(
        step.requests * step.context * config.latent_dim * DENSE_BYTES,
        2.0 * step.rows * heads * step.context * (config.latent_dim + lora),
    )
    return [
        *products,
        ("absorb", _weights(key_up, key_up, step)),
        ("attention", latents),
        ("value_up", _weights(value_up, value_up, step)),
        ("output", _dense(heads * config.v_dim, config, step)),
    ]
