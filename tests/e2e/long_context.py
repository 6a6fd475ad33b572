"""Contexts up to the end of K2.6's positions: 2 layers of its full width, one rank of eight, random
weights, the real engine.

    python tests/e2e/long_context.py [--device cuda] [--longest 262144] [--json FILE]

A **ladder** is one engine whose context grows from 0 to the end. At each border (of attention
blocks, of half the positions, the end itself) a request decodes `NEW` tokens across it; the next
request continues that text with random tokens up to the next border, and finds what came before in
the prefix cache. Three ladders, each an engine of its own with other pieces of prompt:

- plain decoding, pages in order: its tokens and logits are what the others are compared with;
- trees of 15 nodes around the plain answer (replay), on scrambled pages and poisoned memory;
- trees of 63 random nodes, which computes everything below the last two borders afresh, its first
  request being as long as the one but last border.

Compared are the tokens, and every bit of the logits behind them. After each request the memory that
is allocated must be no more than it was after the first. Ends with 1 if anything is amiss.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.drive import scramble
from e2e.exact import commit
from kdtree_engine import SamplingParams
from kdtree_engine.cache import CacheLayout, allocate_pool, pages_for
from kdtree_engine.config import EngineConfig, ModelConfig
from kdtree_engine.drafter.base import Drafter
from kdtree_engine.drafter.none import NoDrafter
from kdtree_engine.drafter.random import RandomDrafter
from kdtree_engine.drafter.replay import ReplayDrafter
from kdtree_engine.engine.loop import Engine
from kdtree_engine.engine.measure.shapes import KIMI_K26, share
from kdtree_engine.engine.measure.weights import random_target
from kdtree_engine.kernels.mla_attention import blocks
from kdtree_engine.model import Kimi

ZONES = [end for end, _ in blocks.BORDERS[:-1]]  # where attention's blocks of keys grow
BORDERS = tuple(sorted({128, 2048, *ZONES, 131_072}))
NEW = 24  # tokens decoded at a border, half of them before it


@dataclass(frozen=True)
class Rung:
    """A request: prompt tokens, and tokens to make."""

    border: int
    prompt: int
    new: int
    params: SamplingParams


@dataclass(frozen=True, eq=False)
class Climbed:
    """What a ladder emitted at each rung: tokens, logits [new, V] on the host, and figures."""

    text: list[int]
    tokens: dict[int, list[int]]
    logits: dict[int, Tensor]
    rungs: list[dict[str, Any]]


def rungs_of(config: ModelConfig) -> list[Rung]:
    """One for every border below the end, and one that ends with the positions."""
    end = config.max_positions
    borders = [border for border in BORDERS if border + NEW < end - NEW] + [end]
    rungs = []
    for index, border in enumerate(borders):
        first = min(border - NEW // 2, end - NEW)
        params = SamplingParams(
            NEW, temperature=float(index % 2), top_p=0.95, seed=index, ignore_eos=True
        )
        rungs.append(Rung(border, first, NEW, params))
    return rungs


def make_engine(target: Kimi, drafter: Drafter, nodes: int, chunk: int, scrambled: bool) -> Engine:
    """A fresh engine with room for one request as long as the positions."""
    config = target.config
    layout = CacheLayout(pages_for(config.max_positions), 1)
    dtype = target.embedding.dtype
    pool = allocate_pool(layout, config.num_layers, config.latent_dim, dtype, target.device)
    engine = Engine(target, drafter, pool, EngineConfig(nodes, False, chunk, layout.pages, 1))
    engine.runner.keep_logits = True
    if scrambled:
        scramble(engine, chunk)
    return engine


def warm_up(engine: Engine) -> None:
    """A step of one row, which a ladder's first request may do without."""
    engine.add([1, 2, 3], SamplingParams(2, ignore_eos=True))
    while engine.has_work or engine.runner.in_flight:
        engine.step()


def climb(engine: Engine, rungs: Sequence[Rung], known: Climbed | None = None) -> Climbed:
    """Decode at each rung. Prompts are the ladder's own text, or `known`'s, and random tokens."""
    vocab = engine.target.config.vocab_size
    text: list[int] = []
    found = Climbed(text, {}, {}, [])
    warm_up(engine)
    for rung in rungs:
        if known is None:
            draw = random.Random(rung.border)
            text += [draw.randrange(vocab) for _ in range(rung.prompt - len(text))]
            prompt = list(text)
        else:
            prompt = known.text[: rung.prompt]
        _reset_peak(engine.device)
        before, began = allocated(engine.device), time.perf_counter()
        request = engine.add(prompt, rung.params)
        rows: list[Tensor] = []
        while request.finish_reason is None:
            for result in engine.step():
                if result.tokens:
                    assert result.logits is not None
                    trace, count = result.trace, len(result.tokens)
                    path = [-1] if trace is None else list(trace.path.indices)[:count]
                    rows.append(result.logits.cpu()[path])
            result = None  # its logits are dropped before memory is counted
        while engine.runner.in_flight:
            engine.step()
        engine.check_integrity()
        found.tokens[rung.border], found.logits[rung.border] = request.output_ids, torch.cat(rows)
        text[rung.prompt :] = request.output_ids
        figures = {
            "border": rung.border,
            "prompt": rung.prompt,
            "from_prefix_cache": request.stats.cached_tokens,
            "tokens": len(request.output_ids),
            "steps": request.stats.steps,
            "error": request.error,
            "allocated": allocated(engine.device),
            "peak_over_resting": _peak(engine.device) - before if before else 0,
            "seconds": round(time.perf_counter() - began, 2),
        }
        found.rungs.append(figures)
        print(json.dumps(figures), flush=True)
    return found


def allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU; 0 on a CPU, which does not count them.

    An engine and its runner know each other: one that was dropped goes with the next collection.
    """
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def differences(name: str, found: Climbed, truth: Climbed) -> list[str]:
    """Where a ladder's tokens or logits are not the truth's."""
    wrong = []
    for border, tokens in found.tokens.items():
        if tokens != truth.tokens[border]:
            wrong.append(f"{name}: other tokens at border {border}")
        a, b = found.logits[border], truth.logits[border]
        if a.shape != b.shape:
            wrong.append(f"{name}: {len(a)} rows at border {border}, not {len(b)}")
            continue
        rows = (a.view(torch.int32) != b.view(torch.int32)).any(1).nonzero().flatten().tolist()
        if rows:
            wrong.append(f"{name}: other logits in rows {rows} at border {border}")
    return wrong


def faults(name: str, found: Climbed) -> list[str]:
    """Requests that failed or ended early, and memory that grew after the first of a ladder."""
    wrong = []
    for rung in found.rungs:
        if rung["error"] or rung["tokens"] != NEW:
            wrong.append(f"{name}: {rung['tokens']} tokens at {rung['border']}: {rung['error']}")
    held = [rung["allocated"] for rung in found.rungs]
    if max(held, default=0) > min(held[:1], default=0):
        wrong.append(f"{name}: memory grew, allocated after each rung {held}")
    elif len({*held}) > 1:
        print(f"{name}: memory fell, allocated after each rung {held}", flush=True)
    return wrong


@torch.inference_mode()
def run(target: Kimi, chunks: tuple[int, int, int] = (8192, 3001, 4096)) -> dict[str, Any]:
    """All three ladders. `chunks`: their pieces of prompt."""
    config, rungs = target.config, rungs_of(target.config)
    plain = climb(make_engine(target, NoDrafter(), 0, chunks[0], False), rungs)
    ladders = {"plain": plain}
    wrong = faults("plain", plain)
    others: dict[str, tuple[Callable[[], Drafter], int, Sequence[Rung]]] = {
        "replay": (lambda: ReplayDrafter([plain.text], config.vocab_size), 15, rungs),
        "random": (lambda: RandomDrafter(config.vocab_size), 63, rungs[-2:]),
    }
    for chunk, (name, (make, nodes, own)) in zip(chunks[1:], others.items(), strict=True):
        print(f"{name}, pieces of {chunk}", flush=True)
        ladder = climb(make_engine(target, make(), nodes, chunk, True), own, plain)
        ladders[name] = ladder
        wrong += faults(name, ladder) + differences(name, ladder, plain)
    if not ladders["replay"].rungs[-1]["steps"] < NEW - 1:
        wrong.append("replay: no draft was accepted")
    return {
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "positions": config.max_positions,
        "pieces": chunks,
        "rungs": {name: ladder.rungs for name, ladder in ladders.items()},
        "rows_compared": sum(
            len(rows) for name in others for rows in ladders[name].logits.values()
        ),
        "faults": wrong,
    }


def rank_of_eight(device: torch.device, longest: int) -> Kimi:
    """Two layers, a dense one and one with experts, in bfloat16."""
    config = replace(share(KIMI_K26, 8), num_layers=2, max_positions=longest)
    return random_target(config, torch.bfloat16, device)


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description="Long contexts at K2.6's width.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--longest", type=int, default=KIMI_K26.max_positions)
    parser.add_argument("--commit", help="what to record where the source has no git history")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    args = parser.parse_args()
    began, device = time.perf_counter(), torch.device(args.device)
    found = run(rank_of_eight(device, args.longest))
    found["seconds"] = round(time.perf_counter() - began, 1)
    found["gpu"] = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    found["torch"], found["commit"] = torch.__version__, args.commit or commit()
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    short = {key: value for key, value in found.items() if key != "rungs"}
    print(json.dumps(short, indent=2))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
