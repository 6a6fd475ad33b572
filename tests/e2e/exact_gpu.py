"""The contract over tens of thousands of tokens, at a GPU's speed.

    python tests/e2e/exact_gpu.py [--tokens 50000] [--alone-seconds 30] [--device cuda]

The packaged model in bfloat16, captured steps, at T = 0 and as many tokens at T = 1 (half of the
requests with top-p 0.95). Up to eight requests at a time, which join and leave, with prompts of
many lengths from held-out text and of random tokens, on scrambled pages and poisoned memory.

Three comparisons, each of every token and of every bit of the logits behind it:

- plain decoding of one request at a time, in engines of one place, for as many requests as
  `--alone-seconds` allow: the **truth** there;
- plain decoding of up to eight requests at a time: compared with that truth, and the truth for the
  requests that were not decoded alone;
- DFlash drafts as trees of 15 and 63 nodes and as chains of 7: compared with the truth, all of it.

A JSON summary goes to tests/e2e/exact_gpu_summary.json. Ends with 1 on a violation.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.drive import MakeDrafter, make_engine, scramble
from e2e.exact import commit, machine
from e2e.models import Loaded, Models
from kdtree_engine import SamplingParams
from kdtree_engine.cache import pages_for
from kdtree_engine.config import EngineConfig
from kdtree_engine.drafter.dflash import DFlashDrafter
from kdtree_engine.drafter.none import NoDrafter
from kdtree_engine.engine.loop import Engine
from kdtree_engine.engine.request import Request, StepResult
from kdtree_engine.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = Path(__file__).with_name("exact_gpu_summary.json")
TREES: dict[str, tuple[int, bool]] = {
    "tree 15": (15, False),
    "tree 63": (63, False),
    "chain:7": (7, True),
}
PLACES = 8
KEPT_STEPS = 64  # whose logits wait to be compared together
LOAD_STEPS = 40  # for which the wished number of requests stays the same
SPEND = (40, 400)  # tokens that a request makes, least and most
LENGTHS = ((1, 8), (60, 70), (120, 135), (250, 262), (300, 460), (508, 520), (1018, 1030))


@dataclass(frozen=True, eq=False)
class Item:
    """A request. first: its first token's place among all tokens of its sampling."""

    prompt: list[int]
    params: SamplingParams
    first: int


def held_out(loaded: Loaded) -> list[int]:
    """Text of packages that no model here was trained on."""
    rows = json.loads((ROOT / "benches" / "data" / "heldout.json").read_text(encoding="utf-8"))
    text = "\n\n\n".join(row["text"] for row in rows["prompts"])
    return Tokenizer.from_folder(loaded.folder).encode(text)


def items_of(loaded: Loaded, text: list[int], temperature: float, tokens: int) -> list[Item]:
    """Requests that make `tokens` tokens together."""
    draw = random.Random(f"exact on a GPU {temperature}")
    items: list[Item] = []
    made = 0
    while made < tokens:
        index = len(items)
        length = draw.randint(*LENGTHS[index % len(LENGTHS)])
        if draw.random() < 0.5:
            start = draw.randrange(len(text) - length)
            prompt = text[start : start + length]
        else:
            prompt = [draw.randrange(loaded.target.config.vocab_size) for _ in range(length)]
        new = min(draw.randint(*SPEND), tokens - made)
        top_p = 0.95 if temperature and index % 2 else None
        params = SamplingParams(
            new, temperature=temperature, top_p=top_p, seed=index, ignore_eos=True
        )
        items.append(Item(prompt, params, made))
        made += new
    return items


class Truth:
    """What all others are compared with: tokens [T], and logits' bits [T, V] where known."""

    def __init__(self, tokens: int, vocab: int, device: torch.device) -> None:
        self.tokens = [-1] * tokens
        self.bits = torch.zeros(tokens, vocab, dtype=torch.int32, device=device)
        self.known = [False] * tokens


class Ledger:
    """What one way of decoding emitted, beside the truth; what is not known yet becomes it."""

    def __init__(self, name: str, truth: Truth) -> None:
        self.name = name
        self.truth = truth
        self.tokens = self.rows = 0
        self.violations: list[str] = []
        self._kept: list[tuple[Tensor, int]] = []  # logits, their first row's place among the kept
        self._places: list[int] = []
        self._rows: list[int] = []
        self._names: list[str] = []
        self._height = 0

    def add(self, item: Item, result: StepResult, before: int) -> None:
        """A step's tokens for one request, which had `before` tokens out."""
        if not result.tokens:
            return
        assert result.logits is not None
        path = [-1 + len(result.logits)]  # a prompt's last row
        if result.trace is not None:
            path = list(result.trace.path.indices)[: len(result.tokens)]
        for offset, (token, row) in enumerate(zip(result.tokens, path, strict=True)):
            place = item.first + before + offset
            where = f"token {before + offset} of a prompt of {len(item.prompt)}, {item.params}"
            if self.truth.known[place]:
                self.tokens += 1
                if token != self.truth.tokens[place]:
                    self._violate(f"{where}: {token}, not {self.truth.tokens[place]}")
            else:
                self.truth.tokens[place] = token
            self._places.append(place)
            self._rows.append(self._height + row)
            self._names.append(where)
        self._kept.append((result.logits, self._height))
        self._height += len(result.logits)

    def settle(self) -> None:
        """Compare the bits of all rows kept so far, or take them as the truth."""
        if not self._kept:
            return
        device = self.truth.bits.device
        rows = torch.cat([logits for logits, _ in self._kept])
        picked = rows.index_select(0, torch.tensor(self._rows, device=device)).view(torch.int32)
        places = torch.tensor(self._places, device=device)
        known = torch.tensor([self.truth.known[place] for place in self._places], device=device)
        differ = (picked != self.truth.bits.index_select(0, places)).sum(1) * known
        self.truth.bits.index_copy_(0, places[~known], picked[~known])
        self.rows += int(known.sum())
        for index in differ.nonzero().flatten().tolist():
            self._violate(
                f"{self._names[index]}: {int(differ[index])} of {picked.shape[1]} logits differ"
            )
        for place in self._places:
            self.truth.known[place] = True
        self._kept, self._places, self._rows, self._names, self._height = [], [], [], [], 0

    def _violate(self, what: str) -> None:
        self.violations.append(f"{self.name}: {what}")


def wishes(places: int) -> Iterator[int]:
    """How many requests there should be, step by step: often all places are taken."""
    draw = random.Random(f"load {places}")
    while True:
        wish = max(1, min(places, draw.randint(1, places + places // 2)))
        yield from [wish] * LOAD_STEPS


def decode(engine: Engine, items: Sequence[Item], ledger: Ledger, seconds: float) -> dict[str, Any]:
    """Run the items as requests that join and leave, no new ones after `seconds`."""
    began = time.perf_counter()
    waiting, running = deque(items), dict[int, tuple[Item, Request, int]]()
    beside: Counter[int] = Counter()
    accepted = steps = done = 0
    for wish in wishes(engine.pool.layout.requests):
        open_for_more = time.perf_counter() - began < seconds
        while waiting and len(running) < wish and open_for_more:
            item = waiting.popleft()
            request = engine.add(item.prompt, item.params)
            running[request.id] = (item, request, 0)
        if not running and not engine.has_work:
            break
        results = engine.step()
        beside[len(results)] += 1
        for result in results:
            item, request, before = running[result.request.id]
            ledger.add(item, result, before)
            running[request.id] = (item, request, before + len(result.tokens))
            if request.finish_reason is not None:
                ended = before + len(result.tokens)
                if ended != item.params.max_tokens:
                    ledger._violate(f"ended after {ended} tokens: {request.error} {item.params}")
                accepted += sum(request.stats.accepted)
                steps += request.stats.steps
                done += 1
                del running[request.id]
        if sum(beside.values()) % KEPT_STEPS == 0:
            ledger.settle()
    ledger.settle()
    engine.check_integrity()
    return {
        "requests": done,
        "tokens_compared": ledger.tokens,
        "logits_rows_compared": ledger.rows,
        "violations": len(ledger.violations),
        "tokens_per_step": round(1 + accepted / max(1, steps), 3),
        "results_in_a_step": {str(count): times for count, times in sorted(beside.items())},
        "captured_graphs": len(engine.runner._graphs),
        "seconds": round(time.perf_counter() - began, 1),
    }


def engine_of(loaded: Loaded, places: int, nodes: int, chain: bool) -> Engine:
    """A fresh engine on scrambled pages, little more than its places fill, all of them poisoned."""

    def drafter(pool: Any) -> Any:
        return DFlashDrafter(loaded.network, loaded.target, pool) if nodes else NoDrafter()

    make: MakeDrafter = drafter
    most = pages_for(LENGTHS[-1][1] + SPEND[1])
    config = EngineConfig(nodes, chain, 512, (places + 1) * most, places)
    engine = make_engine(loaded, make, config, drafts=nodes > 0)
    scramble(engine, places + nodes)
    return engine


def compare(
    loaded: Loaded, items: Sequence[Item], alone_seconds: float
) -> tuple[dict[str, Any], list[str]]:
    """All ways of decoding one sampling's items; what was found, and the violations."""
    last = items[-1]
    total = last.first + last.params.max_tokens
    truth = Truth(total, loaded.target.config.vocab_size, loaded.target.device)
    found: dict[str, Any] = {}
    violations: list[str] = []
    ways = {"plain, alone": (1, 0, False), "plain, together": (PLACES, 0, False)}
    ways |= {name: (PLACES, *how) for name, how in TREES.items()}
    # Alone, in an order that mixes all kinds, however soon the time is up.
    order = random.Random("alone").sample(list(items), len(items))
    for name, how in ways.items():
        ledger = Ledger(name, truth)
        alone = name == "plain, alone"
        engine = engine_of(loaded, *how)
        found[name] = decode(
            engine, order if alone else items, ledger, alone_seconds if alone else torch.inf
        )
        violations += ledger.violations
        print(f"{name}: {json.dumps(found[name])}", flush=True)
        if alone:
            found[name]["truth_tokens"] = sum(truth.known)
        else:
            assert all(truth.known), "requests were left out"
    return found, violations


def warm_up(loaded: Loaded, items: Sequence[Item]) -> None:
    """Compile what a request decoded alone needs: its seconds are counted."""
    last = items[-1]
    total = last.first + last.params.max_tokens
    truth = Truth(total, loaded.target.config.vocab_size, loaded.target.device)
    decode(engine_of(loaded, 1, 0, False), items, Ledger("warm-up", truth), torch.inf)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both samplings; the summary."""
    began = time.perf_counter()
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as home:
        loaded = Models(Path(home), device).load("packaged", "bfloat16")
        text = held_out(loaded)
        warm_up(loaded, items_of(loaded, text, 0.0, args.tokens)[:8])
        samplings: dict[str, Any] = {}
        violations: list[str] = []
        for name, temperature in (("T=0", 0.0), ("T=1", 1.0)):
            items = items_of(loaded, text, temperature, args.tokens)
            print(f"{name}: {len(items)} requests", flush=True)
            samplings[name], wrong = compare(loaded, items, args.alone_seconds / 2)
            violations += [f"{name}, {one}" for one in wrong]
    ways = [way for sampling in samplings.values() for way in sampling.values()]
    return {
        "model": "packaged, bfloat16, DFlash",
        "tokens_a_sampling": args.tokens,
        "tokens_compared": sum(way["tokens_compared"] for way in ways),
        "logits_rows_compared": sum(way["logits_rows_compared"] for way in ways),
        "violations": len(violations),
        "first_violations": violations[:20],
        "compared": "every token and all bits of the logits behind it; with plain decoding of one "
        "request at a time where there was time for it, else with plain decoding of up to eight, "
        "which was compared with the former wherever both were run",
        "samplings": samplings,
        "captured": device.type == "cuda",
        "seconds": round(time.perf_counter() - began, 1),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "commit": args.commit or commit(),
        "python": platform.python_version(),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        **machine(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> int:
    """Run, print, write the summary."""
    parser = argparse.ArgumentParser(description="The exactness contract on a GPU, by bits.")
    parser.add_argument("--tokens", type=int, default=50_000, help="at each temperature")
    parser.add_argument(
        "--alone-seconds", type=float, default=30.0, help="for plain decoding one at a time"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="what to record where the source has no git history")
    parser.add_argument("--summary", type=Path, help="default exact_gpu_summary.json, on CUDA")
    args = parser.parse_args()
    logging.getLogger("kdtree_engine").setLevel(logging.ERROR)  # random prompts draft badly
    found = run(args)
    path = args.summary or (SUMMARY if found["captured"] else None)
    text = json.dumps(found, indent=2) + "\n"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    short = ("tokens_compared", "logits_rows_compared", "violations", "first_violations", "seconds")
    print(json.dumps({key: found[key] for key in short}, indent=2))
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
