"""`make exact`: the contract over the full product of its main axes, in several processes; beside
it the contract under page pressure (pressure.py) and the distribution of sampled words
(distribution.py).

    python tests/e2e/exact.py [product | short] [--minutes M] [--shards N] [--only AXIS=VALUE,...]
        [--device cpu | cuda] [--eager]

`short` runs the covering array of `make test` instead. On CUDA steps are captured, and words are
not drawn: those need a CPU. Prints a line every few seconds, writes a JSON summary (a complete
product on a CPU into tests/e2e/exact_summary.json, which is committed) and ends with 1 on a
violation, 2 if it broke off.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import queue
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.contract import (
    AXES,
    MAIN_AXES,
    OTHER_AXES,
    Case,
    Contract,
    Report,
    covering_cases,
    product_cases,
    prompt_violations,
)
from e2e.distribution import LEVEL, Draws, check_draws, full_draws, quick_draws
from e2e.models import MODELS, Models
from e2e.pressure import QUICK_AXES, Pressure, UnderPressure, pressure_cases

SUMMARY = Path(__file__).with_name("exact_summary.json")
PROMPT_CHUNKS = (7, 64, 512)
PRINT_EVERY = 15.0  # seconds
AnyCase = Case | Pressure | Draws
Unit = tuple[str, list[AnyCase]]  # which of `KINDS`, and cases that share plain answers
Item = tuple[str, AnyCase, Report]
KINDS = ("draws", "pressure", "generate", "prompt")
SECONDS = {"draws": 20.0, "pressure": 6.0, "generate": 0.3, "prompt": 2.0}  # of a case, about
SLOWER = {"packaged": 3.0}  # models, so many times


def plan(args: argparse.Namespace) -> list[Unit]:
    """Units of work, the longest first."""
    cases = list(product_cases()) if args.mode == "product" else covering_cases()
    prompts = [
        Case(model, 0, "none", "greedy", dtype, 1, 512, lengths, "miss", pages)
        for model in MODELS
        for lengths in ("tiles", "block", "blocks")
        for dtype in AXES["dtype"]
        for pages in AXES["pages"]
    ]
    whole = args.mode == "product"
    draws = full_draws() if whole else quick_draws()
    kinds: dict[str, Sequence[AnyCase]] = {
        "draws": draws if args.device == "cpu" else [],
        "pressure": pressure_cases() if whole else pressure_cases(QUICK_AXES),
        "generate": cases,
        "prompt": prompts,
    }
    wanted = dict(item.split("=", 1) for item in args.only.split(",") if item)
    units: dict[tuple[Any, ...], Unit] = {}
    for kind, case in [(kind, case) for kind, some in kinds.items() for case in some]:
        values = vars(case)
        if all(str(values.get(axis)) in value.split("|") for axis, value in wanted.items()):
            units.setdefault(_shared(kind, case), (kind, []))[1].append(case)
    return sorted(units.values(), key=_cost, reverse=True)


def _cost(unit: Unit) -> float:
    """About how many seconds of one core."""
    kind, cases = unit
    return sum(SECONDS[kind] * SLOWER.get(getattr(case, "model", ""), 1.0) for case in cases)


def _shared(kind: str, case: AnyCase) -> tuple[Any, ...]:
    """What cases of one unit have in common."""
    if isinstance(case, Draws):
        return (kind, case.mode, case.filters)
    variant = case.variant if isinstance(case, Case) else 0
    return (kind, case.model, case.dtype, case.sampling, variant)


@torch.inference_mode()
def work(tasks: Any, results: Any, args: argparse.Namespace) -> None:
    """A process: takes units until there is None, reports every case."""
    torch.set_num_threads(args.threads)
    logging.getLogger("kdtree_engine").setLevel(logging.ERROR)  # drafters are bad on purpose
    with tempfile.TemporaryDirectory() as home:
        models = Models(Path(home), torch.device(args.device))
        while (unit := tasks.get()) is not None:
            # plain answers live as long as the unit
            contract = Contract(models, args.eager)
            under_pressure = UnderPressure(models, args.eager)
            kind, cases = unit
            for case in cases:
                if isinstance(case, Draws):
                    report = check_draws(Path(home), case)
                elif isinstance(case, Pressure):
                    report = under_pressure.check(case)
                elif kind == "prompt":
                    report = prompt_violations(contract, case, PROMPT_CHUNKS)
                else:
                    report = contract.check(case)
                results.put((kind, case, report))
    results.put(None)


class Tally:
    """What has been compared so far."""

    def __init__(self, cases: int) -> None:
        self.cases = cases
        self.done = 0
        self.tokens = 0  # of the cases of contract.py
        self.by_kind = dict.fromkeys(KINDS, 0)  # tokens, or rows of prompts
        self.preemptions = 0
        self.by_axis: dict[str, Counter[str]] = {axis: Counter() for axis in AXES}
        self.accepted: set[tuple[int, int]] = set()
        self.violations: list[str] = []
        self.started = time.monotonic()

    def add(self, item: Item) -> None:
        """Count a case."""
        kind, case, report = item
        self.done += 1
        self.violations += map(str, report.violations)
        for violation in report.violations:
            print(f"VIOLATION {violation}", flush=True)
        self.by_kind[kind] += report.tokens
        self.preemptions += report.preemptions
        if kind != "generate":
            return
        self.tokens += report.tokens
        self.accepted.update(report.accepted)
        for axis in AXES:
            self.by_axis[axis][str(vars(case)[axis])] += report.tokens

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    def line(self) -> str:
        """Progress."""
        return (
            f"{self.seconds:6.0f} s  {self.done:5d} of {self.cases} cases  "
            f"{self.tokens:7d} tokens  {self.tokens / self.seconds:5.0f} tokens/s  "
            f"{len(self.violations)} violations"
        )


def run(units: list[Unit], args: argparse.Namespace) -> Tally:
    """Spread the units over processes and gather their reports until done or out of time."""
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for unit in [*units, *[None] * args.shards]:
        tasks.put(unit)
    workers = [
        context.Process(target=work, args=(tasks, results, args), daemon=True)
        for _ in range(args.shards)
    ]
    for worker in workers:
        worker.start()
    tally = Tally(sum(len(cases) for _, cases in units))
    running, printed = args.shards, time.monotonic()
    while running and tally.seconds < 60 * args.minutes:
        try:
            item = results.get(timeout=5)
        except queue.Empty:
            if any(worker.exitcode for worker in workers):
                print("a worker died; see its message above", flush=True)
                break
            continue
        if item is None:
            running -= 1
        else:
            tally.add(item)
        if time.monotonic() - printed > PRINT_EVERY or not running:
            printed = time.monotonic()
            print(tally.line(), flush=True)
    for worker in workers:
        worker.terminate()
    return tally


def machine() -> dict[str, Any]:
    """What the bits may depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", "").split()
    kinds = ("avx", "fma", "f16c", "amx")
    build = torch.__config__.show().splitlines()
    return {
        "cpu": fields.get("model name", "unknown"),
        "cpu_flags": sorted(flag for flag in flags if flag.startswith(kinds)),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "libraries": [line.strip(" -") for line in build if "MKL" in line and "Version" in line],
    }


def commit() -> str:
    """The source that ran; "+" where it has changes."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def summary(tally: Tally, args: argparse.Namespace) -> dict[str, Any]:
    """The run as plain values."""
    return {
        "mode": args.mode,
        "complete": tally.done == tally.cases,
        "full_product": {axis: list(map(str, values)) for axis, values in MAIN_AXES.items()},
        "pairwise": {axis: list(map(str, values)) for axis, values in OTHER_AXES.items()},
        "cases": tally.done,
        "generated_tokens_compared": tally.tokens,
        "prompt_logits_rows_compared": tally.by_kind["prompt"],
        "tokens_compared_under_pressure": tally.by_kind["pressure"],
        "preemptions": tally.preemptions,
        "tokens_drawn_for_chi_square": tally.by_kind["draws"],
        "chi_square_level": LEVEL,
        "violations": len(tally.violations),
        "first_violations": tally.violations[:20],
        "depth_and_sibling_rank_pairs_accepted": len(tally.accepted),
        "tokens_by_axis": {axis: dict(counts) for axis, counts in tally.by_axis.items()},
        "seconds": round(tally.seconds),
        "tokens_per_second": round(tally.tokens / tally.seconds, 1),
        "processes": args.shards,
        "threads_each": args.threads,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "captured": args.device == "cuda" and not args.eager,
        "commit": args.commit or commit(),
        **machine(),
    }


def main() -> int:
    """Run, print, write the summary."""
    parser = argparse.ArgumentParser(description="The exactness contract, by bits.")
    parser.add_argument("mode", nargs="?", choices=("product", "short"), default="product")
    parser.add_argument("--minutes", type=float, default=45.0, help="break off after so long")
    parser.add_argument("--shards", type=int, default=2, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--only", default="", help="axis=value|value,axis=value: these cases only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--eager", action="store_true", help="on CUDA: capture no steps")
    parser.add_argument("--commit", help="what to record where the source has no git history")
    parser.add_argument("--summary", type=Path, help="where to write the summary")
    args = parser.parse_args()
    units = plan(args)
    print(f"{sum(len(cases) for _, cases in units)} cases in {len(units)} units", flush=True)
    tally = run(units, args)
    found = summary(tally, args)
    whole = args.mode == "product" and found["complete"] and not args.only
    whole &= args.device == "cpu"
    path = args.summary or (SUMMARY if whole else None)
    text = json.dumps(found, indent=2) + "\n"
    if path is not None:
        path.write_text(text, encoding="utf-8")
    else:
        print(text)
    if tally.violations:
        return 1
    return 0 if found["complete"] else 2


if __name__ == "__main__":
    sys.exit(main())
