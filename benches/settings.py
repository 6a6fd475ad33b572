"""What benches/decode.py decodes, how it reads one run off the engine, and its sums."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.config import ModelConfig
from kdtree_engine.kernels.matmul import free_of_contract
from kdtree_engine.tokenizer import Tokenizer

HELDOUT = Path(__file__).resolve().parent / "data" / "heldout.json"


@dataclass(frozen=True)
class Machine:
    """An engine to build: its drafter, its tree, and whether products keep the contract."""

    drafter: str  # "dflash", "ngram" or "none"
    tree_nodes: int | str
    natural: bool = False  # products at their natural row counts

    def load(self, device: str) -> LLM:
        """The packaged model with this drafter and tree, in the device's own dtype."""
        drafter = "auto" if self.drafter == "dflash" else self.drafter
        return LLM(drafter=drafter, device=device, tree_nodes=self.tree_nodes)

    def __str__(self) -> str:
        if self.natural:
            return "plain, natural rows"
        if not self.tree_nodes:
            return "plain"
        kind = "" if self.drafter == "dflash" else f"{self.drafter} "
        nodes = str(self.tree_nodes)
        return f"{kind}{nodes if ':' in nodes else f'tree {nodes}'}"


PLAIN = Machine("none", 0)
NATURAL = Machine("none", 0, natural=True)
TREES = tuple(Machine("dflash", nodes) for nodes in ("chain:7", 7, 15, 31))
LARGEST = Machine("dflash", 63)
NGRAM = Machine("ngram", 15)


@dataclass(frozen=True)
class Setting:
    """A machine at a temperature (top-p 1): one row of the table."""

    machine: Machine
    temperature: float

    def params(self, prompt: int, new_tokens: int) -> SamplingParams:
        """Settings of the prompt of that index; every machine samples with the same seed."""
        return SamplingParams(
            max_tokens=new_tokens, temperature=self.temperature, seed=1000 + prompt, ignore_eos=True
        )

    def __str__(self) -> str:
        return f"{self.machine} at T={self.temperature:g}"


@dataclass(frozen=True)
class Prompt:
    """The first tokens of a held-out snippet."""

    index: int
    package: str
    tokens: tuple[int, ...]


def load_prompts(tokenizer: Tokenizer, each: int, length: int) -> list[Prompt]:
    """`each` prompts of `length` tokens from every package, the packages taken in turn."""
    rows = json.loads(HELDOUT.read_text(encoding="utf-8"))["prompts"]
    pools: dict[str, list[tuple[int, ...]]] = {}
    for row in rows:
        tokens = tokenizer.encode(row["text"])
        if len(tokens) >= length:
            pools.setdefault(row["package"], []).append(tuple(tokens[:length]))
    prompts: list[Prompt] = []
    for turn in range(each):
        for package, pool in sorted(pools.items()):
            if turn < len(pool):
                prompts.append(Prompt(len(prompts), package, pool[turn]))
    return prompts


@dataclass(frozen=True)
class Decoded:
    """One request decoded alone. seconds: from its first token, which the prefill gives, to its
    last. phases: those seconds as the engine's own stopwatch splits them.
    """

    tokens: list[int]
    steps: int
    seconds: float
    phases: dict[str, float]


def decode(llm: LLM, machine: Machine, prompt: Sequence[int], params: SamplingParams) -> Decoded:
    """Stream one request and time what comes after its first token."""
    start, prefill = 0.0, dict[str, float]()
    with free_of_contract() if machine.natural else nullcontext():
        for event in llm.stream(prompt, params):
            if event.output is not None:
                end = time.perf_counter()
                stats = event.output.stats
                phases = {k: v - prefill.get(k, 0.0) for k, v in stats.seconds.items()}
                return Decoded(event.output.token_ids, stats.steps, end - start, phases)
            if event.token_ids and not start:
                prefill = dict(llm.engine.scheduler.running[0].stats.seconds)
                start = time.perf_counter()
    raise AssertionError("the stream ended without an output")


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """Share of different ones among an output's n-grams; looping text is far below 1."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def acceptance(tokenizer: Tokenizer, outputs: Sequence[Any]) -> dict[str, float]:
    """Tokens and bytes of text a step over all prompts, and the mean share of distinct 4-grams.

    The first token comes from the prefill and is in neither count.
    """
    steps = sum(out.stats.steps for out in outputs)
    accepted = sum(sum(out.stats.accepted) for out in outputs)
    text = "".join(tokenizer.decode(out.token_ids[1:]) for out in outputs)
    per_prompt = [out.stats.tokens_per_step for out in outputs]
    return {
        "tokens_per_step": round(1 + accepted / steps, 3),
        "tokens_per_step_lowest_prompt": round(min(per_prompt), 3),
        "tokens_per_step_highest_prompt": round(max(per_prompt), 3),
        "bytes_per_step": round(len(text.encode()) / steps, 2),
        "distinct_4grams": round(
            statistics.fmean(distinct_share(out.token_ids) for out in outputs), 3
        ),
    }


def weight_bytes(config: ModelConfig, itemsize: int, packed: bool) -> int:
    """Bytes of the weights that one row must read in a step: its own experts, all else whole.

    packed: routed experts are read as INT4 with a bfloat16 scale for 32, else unpacked.
    """
    c, hidden = config, config.hidden_size
    query = c.num_heads * (c.nope_dim + c.rope_dim)
    lora = c.q_lora_rank
    attention = query * hidden if lora is None else lora * (hidden + query)
    attention += hidden * (c.kv_lora_rank + c.rope_dim)
    attention += c.kv_lora_rank * c.num_heads * (c.nope_dim + c.v_dim)
    attention += c.num_heads * c.v_dim * hidden
    expert = 3 * hidden * c.moe_intermediate_size
    whole = expert * c.num_shared_experts + hidden * c.num_experts
    dense_layers = sum(not c.is_moe_layer(layer) for layer in range(c.num_layers))
    sparse_layers = c.num_layers - dense_layers
    elements = (
        c.num_layers * attention
        + dense_layers * 3 * hidden * c.intermediate_size
        + sparse_layers * whole
        + hidden * c.vocab_size
    )
    routed = sparse_layers * expert * c.experts_per_token
    return itemsize * elements + int(routed * (0.5 + 2 / 32 if packed else itemsize))


def read_seconds(size: int) -> float:
    """The least time in which all threads read that many bytes once: the floor of a step."""
    block = torch.ones(size // 4)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
