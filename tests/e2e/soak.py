"""Many steps of requests that come, go, are cancelled and preempt each other: does anything grow,
leak, or change a text?

    python tests/e2e/soak.py [--steps N] [--device cpu | cuda] [--seed S] [--summary FILE]

Several engines take turns, each with a drafter, a tree and a way to run of its own, all with a
cache that is too small. Pages and places are checked after every step. Some finished requests
of every kind are compared with plain decoding: tokens, what ended them, log-probabilities. Once
every engine has run for a while, memory may grow no further.
Prints a line every few seconds, writes a JSON summary, and ends with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkpoint_tools import write_byte_tokenizer

from e2e.exact import commit
from e2e.models import TINY
from e2e.pretend import Pretend
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints.templates import K26
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.engine.request import Request

DIMS = replace(TINY, vocab_size=512)  # the bytes and the special tokens, so that there is text
PLACES, PAGES = 8, 9
WAITING = 4  # requests kept in the queue
SLICE = 250  # steps until the next engine has its turn
WARM_ROUNDS = 2  # turns of each engine before memory is measured
COMPARED_EVERY = 10  # of so many finished requests of a kind one is compared with plain decoding
CANCEL = 0.01  # the share of steps before which somebody is cancelled
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

Options = dict[str, Any]
LETTERS = tuple(range(ord("a"), ord("z") + 1))
STOPS = tuple(range(0, DIMS.vocab_size, 25))


def kinds() -> dict[str, Callable[[random.Random, int], Options]]:
    """Kinds of requests by name: what draws the options of one that makes so many tokens at most;
    where nothing else is said, temperature is 1 and the model's own stop tokens are ignored.
    """
    return {
        "greedy": lambda draw, new: {"temperature": 0.0},
        "sampled": lambda draw, new: {},
        "filtered": lambda draw, new: {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
        "stopped": lambda draw, new: {"stop_token_ids": STOPS, "ignore_eos": False},
        "stop texts": _stop_texts,
        "min tokens": _least,
        "penalties": _penalties,
        "bias": lambda draw, new: {"logit_bias": {one: draw.uniform(-6, 6) for one in LETTERS}},
        "bad words": _bad_words,
        "log-probs": _log_probs,
        "all": lambda draw, new: {
            **_bad_words(draw, new),
            **_log_probs(draw, new),
            **_penalties(draw, new),
            **_least(draw, new),
            **_stop_texts(draw, new),
            "logit_bias": {one: draw.uniform(-3, 3) for one in LETTERS},
            "top_p": 0.95,
        },
    }


def _stop_texts(draw: random.Random, new: int) -> Options:
    """Letters, until one of a few pairs has come."""
    pairs = ["".join(map(chr, draw.choices(LETTERS, k=2))) for _ in range(8)]
    return {"allowed_token_ids": LETTERS, "stop": pairs}


def _least(draw: random.Random, new: int) -> Options:
    return {"min_tokens": draw.randint(0, min(new, 90)), "stop_token_ids": (*STOPS, *LETTERS[:3])}


def _penalties(draw: random.Random, new: int) -> Options:
    return {
        "temperature": draw.choice((0.0, 1.0)),
        "repetition_penalty": draw.choice((1.0, 1.3)),
        "frequency_penalty": draw.choice((0.0, 0.5)),
        "presence_penalty": draw.choice((-0.4, 0.4)),
    }


def _bad_words(draw: random.Random, new: int) -> Options:
    """Sequences of one, two and three out of a few tokens, so that some would come."""
    few = draw.sample(LETTERS, 8)
    words = [few[:1], *(draw.choices(few[1:], k=draw.choice((2, 3))) for _ in range(15))]
    return {"allowed_token_ids": few, "bad_words": words}


def _log_probs(draw: random.Random, new: int) -> Options:
    return {"logprobs": draw.randint(0, 20), "prompt_logprobs": draw.choice((None, 0, 3))}


def settings_of(kind: str, draw: random.Random) -> SamplingParams:
    """Settings of a request of that kind."""
    new = draw.choice((1, 20, 60, 100, 200, 300))
    given: Options = {"temperature": 1.0, "ignore_eos": True, **kinds()[kind](draw, new)}
    return SamplingParams(new, seed=draw.getrandbits(64), **given)


@dataclass
class Counts:
    """What happened."""

    steps: int = 0
    tokens: int = 0
    compared_preempted: int = 0
    compared_samples: int = 0
    preemptions: int = 0
    added: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)  # what by: "token" or "text"
    finished: Counter[str] = field(default_factory=Counter)  # by kind
    compared: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Traffic:
    """One engine and the requests on it."""

    def __init__(self, llm: LLM, name: str, plain: LLM, counts: Counts, seed: int) -> None:
        self.llm, self.name, self.plain, self.counts = llm, name, plain, counts
        self.draw = random.Random(f"soak {seed} {name}")
        self.next_kind = itertools.cycle(self.draw.sample(list(kinds()), len(kinds())))
        self.prompts = [self._ids(self.draw.choice((3, 20, 40, 50, 60, 130))) for _ in range(6)]
        self.live: dict[Request, str] = {}  # and their kinds

    def step(self) -> None:
        """Top up the queue, perhaps cancel somebody, advance, check, count."""
        scheduler = self.llm.engine.scheduler
        while len(scheduler.waiting) < WAITING:
            self._join()
        if self.draw.random() < CANCEL:
            self._end(self.draw.choice(list(self.live)), "cancelled")
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
        kind = next(self.next_kind)
        params = settings_of(kind, draw)
        assert params.seed is not None
        first: Request | None = None
        for sample in range(draw.choice((1, 1, 1, 3))):
            added = self.llm.engine.add(
                prompt,
                replace(params, seed=(params.seed + sample) % 2**64),
                keep_logits=first is None and draw.random() < 0.05,
                sample=sample,
                after=first,
            )
            self.live[added] = kind
            self.counts.added[kind] += 1
            first = first or added

    def _end(self, request: Request, how: str) -> None:
        counts = self.counts
        self.llm.engine.cancel(request)
        kind = self.live.pop(request)
        counts.ended[how] += 1
        counts.preemptions += request.stats.preemptions
        if request.error is not None:
            counts.wrong.append(f"{self.name}: {request.params}: {request.error}")
        elif how in ("stop", "length"):
            if how == "stop":
                by_text = isinstance(request.stopped_by, str)
                counts.stopped["text" if by_text else "token"] += 1
            if counts.finished[kind] % COMPARED_EVERY == 0:
                self._compare(request, kind)
            counts.finished[kind] += 1

    def _compare(self, request: Request, kind: str) -> None:
        """Tokens, what ended them, and what was told of their likelihoods and the prompt's."""
        prompt = request.tokens[: request.prompt_tokens]
        [truth] = self.plain.generate(prompt, request.params)
        self.counts.compared[kind] += 1
        self.counts.compared_preempted += request.stats.preemptions > 0
        self.counts.compared_samples += request.sample > 0
        wanted = {
            "tokens": (request.output_ids, truth.token_ids),
            "end": (
                (request.finish_reason, request.stopped_by),
                (truth.finish_reason, truth.stopped_by),
            ),
            "log_probs": (request.log_probs, truth.log_probs or []),
            "prompt_log_probs": (request.prompt_log_probs, (truth.prompt_log_probs or [None])[1:]),
        }
        self.counts.wrong += [
            f"{self.name}, step {self.counts.steps}: {what} of {request.params} after {prompt}: "
            f"{found}, plain decoding {expected}"
            for what, (found, expected) in wanted.items()
            if found != expected
        ]

    def _ids(self, count: int) -> list[int]:
        return [self.draw.randrange(DIMS.vocab_size) for _ in range(count)]


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
        make_checkpoint(folder, K26, 5, drafter=True, dims=DIMS)
        write_byte_tokenizer(folder)
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
        "stopped_by": dict(counts.stopped),
        "preemptions": counts.preemptions,
        "compared_with_plain_decoding": dict(counts.compared),
        "compared_that_were_preempted": counts.compared_preempted,
        "compared_that_were_further_samples": counts.compared_samples,
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
        f"{counts.compared.total():4d} compared  {memory / 2**20:7.1f} MiB  "
        f"{len(counts.wrong)} wrong"
    )


def main() -> int:
    """Run, print, write the summary."""
    parser = argparse.ArgumentParser(description="Many steps under pressure.")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what to record where the source has no git history")
    parser.add_argument("--summary", type=Path, help="where to write the summary")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = soak(args.steps, args.device, args.seed)
    found["commit"] = args.commit or commit()
    text = json.dumps(found, indent=2) + "\n"
    if args.summary is not None:
        args.summary.write_text(text, encoding="utf-8")
    print(text)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
