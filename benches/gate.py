"""What every bench needs before and around a number: the gate, the machine's facts, paired timing.

The gate refuses to time a setting whose tokens, or whose logits' bits, are not plain decoding's.
"""

from __future__ import annotations

import datetime
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kdtree_engine import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


class GateError(SystemExit):
    """Nothing may be timed: the output is not the one that plain decoding gives."""


def require_equal_tokens(
    setting: str, expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> None:
    """Raise GateError at the first prompt whose tokens differ."""
    if len(expected) != len(found):
        raise GateError(f"gate: {setting} gave {len(found)} outputs for {len(expected)} prompts")
    for index, (want, got) in enumerate(zip(expected, found, strict=True)):
        if list(want) == list(got):
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b),
            min(len(want), len(got)),
        )
        raise GateError(
            f"gate: {setting} differs from plain decoding at token {place} of prompt {index} "
            f"({len(want)} tokens expected, {len(got)} found); nothing was timed"
        )


def require_equal_logits(setting: str, expected: Tensor, found: Tensor) -> None:
    """Raise GateError unless the logits behind every token have the same bits."""
    if expected.shape != found.shape or not torch.equal(expected, found):
        rows = "shapes differ"
        if expected.shape == found.shape:
            rows = f"{int((expected != found).any(1).sum())} of {len(expected)} rows differ"
        raise GateError(
            f"gate: the logits of {setting} are not plain decoding's ({rows}); nothing was timed"
        )


def decoded_logits(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> Tensor:
    """[tokens, vocab]: the row that chose each emitted token, taken from the engine's own steps."""
    rows: list[Tensor] = []
    runner = llm.engine.runner
    runner.keep_logits = True
    request = llm.engine.add(prompt, params)
    try:
        while llm.engine.has_work:
            for result in llm.engine.step():
                if not result.tokens:
                    continue
                assert result.logits is not None
                trace = result.trace
                path = [0] if trace is None else list(trace.path.indices)[: len(result.tokens)]
                rows.append(result.logits[path].clone())
    finally:
        runner.keep_logits = False
        llm.engine.cancel(request)
    return torch.cat(rows)


def interleaved(
    names: Sequence[Name],
    rounds: Sequence[Any],
    measure: Callable[[Name, Any], Result],
    seed: int = 0,
) -> dict[Name, list[Result]]:
    """Measure every name once in each round, in an order drawn anew for the round.

    Whatever the machine does meanwhile then hits all names alike. Results in the rounds' order.
    """
    draw = random.Random(seed)
    found: dict[Name, list[Result]] = {name: [] for name in names}
    for one in rounds:
        for name in draw.sample(list(names), len(names)):
            found[name].append(measure(name, one))
    return found


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How many times faster than `base` (seconds, one a repeat) `other` was in the same repeats."""
    ratios = [a / b for a, b in zip(base, other, strict=True)]
    return {
        "median": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
    }


def environment_facts(commit: str | None = None) -> dict[str, Any]:
    """What a reader needs to judge or repeat a number. commit: for a copy without its history."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "commit": commit or _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", "src", "benches/*.py")),
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    """Name, family and model: virtual machines often give the first without its number."""
    facts: Mapping[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line]
        facts = {key.strip(): value.strip() for key, value in reversed(lines)}
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return (
        f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')}, "
        f"{facts.get('cache size')} cache)"
    )
