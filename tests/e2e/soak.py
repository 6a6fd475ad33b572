"""Many steps of requests that come, go, are cancelled and preempt each other: does anything grow,
leak, or change a text?

    python tests/e2e/soak.py [--steps N] [--device cpu | cuda] [--seed S] [--summary FILE]

Several engines take turns, each with a drafter, a tree and a way to run of its own, all with a
cache that is too small. Pages and places are checked after every step. Some finished requests
are compared with plain decoding. Once every engine has run for a while, memory may grow no further.
Prints a line every few seconds, writes a JSON summary, and ends with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.models import TINY
from e2e.pretend import Pretend
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints.templates import K26
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.engine.request import Request

PLACES, PAGES = 8, 10
WAITING = 4  # requests kept in the queue
SLICE = 250  # steps until the next engine has its turn
WARM_ROUNDS = 2  # turns of each engine before memory is measured
COMPARED_EVERY = 40  # of so many finished requests one is compared with plain decoding
CANCEL = 0.03  # the share of steps before which somebody is cancelled
PRINT_EVERY = 10.0  # seconds
MOST_GROWTH = 24 << 20  # bytes of resident memory; the allocator's own raggedness
MOST_CUDA_GROWTH = 16 << 20  # bytes that tensors hold: a graph captured late

# Drafter, tree, how it runs: as it stands, looking ahead, or captured (pretended on a CPU).
Setting = tuple[str, int | str, str]
SETTINGS: tuple[Setting, ...] = (
    ("none", 0, "direct"),
    ("ngram", 7, "direct"),
    ("dflash", 15, "ahead"),
    ("dflash", "chain:5", "captured"),
    ("ngram", "chain:4", "captured"),
    ("none", 0, "ahead"),
)

Kind = Callable[[random.Random], SamplingParams]


def kinds() -> dict[str, Kind]:
    """Kinds of requests by name: what draws the settings of one."""

    def new(draw: random.Random) -> int:
        return draw.choice((1, 2, 20, 100, 200, 300))

    return {
        "greedy": lambda draw: SamplingParams(new(draw), ignore_eos=True),
        "sampled": lambda draw: SamplingParams(
            new(draw), 1.0, seed=draw.getrandbits(64), ignore_eos=True
        ),
        "filtered": lambda draw: SamplingParams(
            new(draw),
            1.0,
            top_k=20,
            top_p=0.9,
            min_p=0.02,
            seed=draw.getrandbits(64),
            ignore_eos=True,
        ),
        "stopped": lambda draw: SamplingParams(
            new(draw), 1.0, seed=draw.getrandbits(64), stop_token_ids=(7, 11)
        ),
    }


@dataclass
class Counts:
    """What happened."""

    steps: int = 0
    tokens: int = 0
    compared: int = 0
    preemptions: int = 0
    added: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Traffic:
    """One engine and the requests on it."""

    def __init__(self, llm: LLM, name: str, plain: LLM, counts: Counts, seed: int) -> None:
        self.llm, self.name, self.plain, self.counts = llm, name, plain, counts
        self.draw = random.Random(f"soak {seed} {name}")
        self.kinds = kinds()
        self.prompts = [self._ids(self.draw.choice((3, 20, 40, 60, 70, 150))) for _ in range(6)]
        self.live: list[Request] = []

    def step(self) -> None:
        """Top up the queue, perhaps cancel somebody, advance, check, count."""
        scheduler = self.llm.engine.scheduler
        while len(scheduler.waiting) < WAITING:
            self._join()
        if self.draw.random() < CANCEL:
            self._end(self.draw.choice(self.live), "cancelled")
        for result in self.llm.engine.step():
            self.counts.tokens += len(result.tokens)
        self.llm.engine.check_integrity()
        self.counts.steps += 1
        for request in [one for one in self.live if _has_ended(one)]:
            self._end(request, request.finish_reason or "logits")

    def _join(self) -> None:
        """One request, or samples of one prompt; a known prompt, or with a new end."""
        draw = self.draw
        prompt = draw.choice(self.prompts)
        if draw.random() < 0.6:
            prompt = [*prompt[: draw.randrange(len(prompt))], *self._ids(draw.randrange(1, 30))]
        kind = draw.choice(list(self.kinds))
        self.counts.added[kind] += 1
        first: Request | None = None
        for _ in range(draw.choice((1, 1, 1, 3))):
            params = self.kinds[kind](draw)
            first_one = self.llm.engine.add(
                prompt, params, keep_logits=first is None and draw.random() < 0.05, after=first
            )
            self.live.append(first_one)
            first = first or first_one

    def _end(self, request: Request, how: str) -> None:
        self.llm.engine.cancel(request)
        self.live.remove(request)
        self.counts.ended[how] += 1
        self.counts.preemptions += request.stats.preemptions
        if request.error is not None:
            self.counts.wrong.append(f"{self.name}: {request.error}")
        elif how in ("stop", "length") and sum(self.counts.ended.values()) % COMPARED_EVERY == 0:
            self._compare(request)

    def _compare(self, request: Request) -> None:
        prompt = request.tokens[: request.prompt_tokens]
        [truth] = self.plain.generate(prompt, request.params)
        self.counts.compared += 1
        if truth.token_ids != request.output_ids:
            self.counts.wrong.append(
                f"{self.name}, step {self.counts.steps}: {request.params} after {prompt} gave "
                f"{request.output_ids}, plain decoding {truth.token_ids}"
            )

    def _ids(self, count: int) -> list[int]:
        return [self.draw.randrange(TINY.vocab_size) for _ in range(count)]


def _has_ended(request: Request) -> bool:
    return request.finish_reason is not None or (request.keep_logits and not request.is_prefill)


def traffic(
    folder: Path, device: str, counts: Counts, seed: int, settings: Sequence[Setting]
) -> list[Traffic]:
    """An engine for each of `settings`."""
    plain = LLM(folder, drafter="none", device=device, tree_nodes=0, max_requests=1)
    found = []
    for drafter, nodes, way in settings:
        llm = LLM(
            folder,
            drafter=folder / "drafter" if drafter == "dflash" else drafter,
            device=device,
            tree_nodes=nodes,
            prefill_chunk=48,
            cache_pages=PAGES,
            max_requests=PLACES,
            eager=way != "captured",
        )
        if device == "cpu":
            llm.engine.lookahead = way != "direct"
            if way == "captured":
                llm.engine.runner = Pretend(llm.engine, PLACES, eager=False)
                llm.engine.runner.captures = True
        found.append(Traffic(llm, f"{drafter} {nodes} {way}", plain, counts, seed))
    return found


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    gc.collect()
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def held(device: str) -> int:
    """Bytes of CUDA memory that tensors hold."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def soak(
    steps: int,
    device: str,
    seed: int,
    length: int = SLICE,
    settings: Sequence[Setting] = SETTINGS,
) -> dict[str, Any]:
    """Run; the summary as plain values. length: steps of a turn."""
    logging.getLogger("kdtree_engine").setLevel(logging.ERROR)  # random drafters guess badly
    counts, began, printed = Counts(), time.monotonic(), 0.0
    warm: tuple[int, int] | None = None
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "model"
        make_checkpoint(folder, K26, 5, drafter=True, dims=TINY)
        engines = traffic(folder, device, counts, seed, settings)
        turn = 0
        while counts.steps < steps and not counts.wrong:
            if turn == WARM_ROUNDS * len(engines):
                warm = resident(), held(device)
            for _ in range(min(length, steps - counts.steps)):
                engines[turn % len(engines)].step()
            turn += 1
            if time.monotonic() - printed > PRINT_EVERY:
                printed = time.monotonic()
                print(_line(counts, printed - began, resident()), flush=True)
        for one in engines:
            for request in list(one.live):
                one._end(request, "left at the end")
            one.llm.engine.step()  # what was still under way lands
            one.llm.engine.check_integrity()
            if one.llm.engine.scheduler.allocator.available != PAGES:
                counts.wrong.append(f"{one.name}: pages are missing at the end")
        now = resident(), held(device)
    growth = None if warm is None else (now[0] - warm[0], now[1] - warm[1])
    if growth is not None and growth[0] > MOST_GROWTH:
        counts.wrong.append(f"memory grew by {growth[0]:,} bytes, {MOST_GROWTH:,} allowed")
    if growth is not None and growth[1] > MOST_CUDA_GROWTH:
        counts.wrong.append(f"tensors on the GPU grew by {growth[1]:,} bytes")
    return {
        "steps": counts.steps,
        "device": device,
        "seed": seed,
        "engines": [one.name for one in engines],
        "places": PLACES,
        "pages": PAGES,
        "tokens": counts.tokens,
        "requests_added": dict(counts.added),
        "requests_ended": dict(counts.ended),
        "preemptions": counts.preemptions,
        "compared_with_plain_decoding": counts.compared,
        "wrong": counts.wrong[:20],
        "resident_bytes": now[0],
        "resident_growth_bytes": None if growth is None else growth[0],
        "cuda_growth_bytes": None if growth is None else growth[1],
        "seconds": round(time.monotonic() - began),
    }


def _line(counts: Counts, seconds: float, memory: int) -> str:
    return (
        f"{seconds:6.0f} s  {counts.steps:6d} steps  {counts.tokens:7d} tokens  "
        f"{sum(counts.ended.values()):5d} ended  {counts.preemptions:5d} preemptions  "
        f"{counts.compared:4d} compared  {memory / 2**20:7.1f} MiB  {len(counts.wrong)} wrong"
    )


def main() -> int:
    """Run, print, write the summary."""
    parser = argparse.ArgumentParser(description="Many steps under pressure.")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--summary", type=Path, help="where to write the summary")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = soak(args.steps, args.device, args.seed)
    text = json.dumps(found, indent=2) + "\n"
    if args.summary is not None:
        args.summary.write_text(text, encoding="utf-8")
    print(text)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
