"""Checks and times every operator's launch variants (benches/ops) on this machine's GPU.

    python benches/kernels.py [--ops dense,router] [--filter REGEX] [--budget SECONDS] [--json FILE]

A variant is checked before it is timed; one that is wrong or raises takes one line and stops
nobody. Its time is the median of graph replays that go over all its layers, so that weights come
from memory; its floor the longer of its bytes at a copy's bandwidth and its operations at the rate
of a large product, both measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from ops.base import Variant, median_us

from kdtree_engine.engine.measure.table import Machine
from kdtree_engine.engine.measure.timing import check_machine, measure_machine
from kdtree_engine.errors import KDTreeError

OPS = Path(__file__).resolve().parent / "ops"
Timer = Callable[[Variant], float]


@dataclass(frozen=True)
class Row:
    """One variant: microseconds of a call and its floor, or what is wrong with it."""

    op: str
    variant: str
    us: float | None = None
    floor_us: float = 0.0
    wrong: str | None = None

    @property
    def ratio(self) -> float:
        """Fraction of the floor, 0 where there is no time."""
        return self.floor_us / self.us if self.us else 0.0

    def text(self) -> str:
        """A line of the table."""
        if self.us is None:
            return f"{self.op:<18}{self.variant:<70} {self.wrong}"
        return f"{self.op:<18}{self.variant:<70}{self.us:>10.2f}{self.ratio:>7.2f}"


class Out(Exception):
    """Nothing more can be measured here: the budget is spent, or the device is lost."""


class DeviceLost(Out):
    """An error that stays: every further call of this process would fail."""


def group_of(variant: str) -> str:
    """What variants compete in: the name before its launch constants."""
    return re.split(r" \| |: | chosen\b| ?[\[(]", variant, maxsplit=1)[0].strip()


def floor_us(variant: Variant, machine: Machine) -> float:
    """The least microseconds of one call."""
    moved = variant.bytes / (machine.bandwidth_tbs * 1e6)
    return max(moved, variant.flops / (machine.matmul_tflops * 1e6))


def time_variant(variant: Variant) -> float:
    """Microseconds of one call: all layers in one graph, over their number."""

    def every_layer() -> None:
        for layer in range(variant.layers):
            variant.run(layer)

    return median_us(every_layer) / variant.layers


def measure_op(
    op: str,
    variants: Iterator[Variant],
    machine: Machine,
    wanted: re.Pattern[str],
    deadline: float,
    timer: Timer = time_variant,
) -> Iterator[Row]:
    """Rows of one operator. Raises Out after the deadline or when the device is lost."""
    while True:
        if time.monotonic() > deadline:
            raise Out("the budget is spent")
        try:
            variant = next(variants, None)
        except Exception as error:  # noqa: BLE001 - whatever it is, other operators go on
            yield Row(op, "(all that follow)", wrong=describe(error))
            check_device()
            return
        if variant is None:
            return
        if not wanted.search(f"{op} {variant.name}"):
            continue
        try:
            wrong = variant.check()
            check_device()
            us = None if wrong else timer(variant)
            row = Row(op, variant.name, us, floor_us(variant, machine), wrong and f"WRONG: {wrong}")
        except Exception as error:  # noqa: BLE001 - whatever it is, other variants go on
            row = Row(op, variant.name, wrong=describe(error))
        yield row
        check_device()


def describe(error: Exception) -> str:
    """One line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def check_device() -> None:
    """Raise DeviceLost if an error of the device stays."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(describe(error)) from error


def best_rows(rows: list[Row]) -> list[Row]:
    """The fastest right variant of each group, in order of appearance."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.op, group_of(row.variant)
        if row.us is not None and (key not in best or row.us < (best[key].us or 0.0)):
            best[key] = row
    return list(best.values())


def json_line(row: Row, machine: Machine) -> str:
    """One measurement."""
    data = {"bench": "kernel", **dataclasses.asdict(row), "group": group_of(row.variant)}
    return json.dumps({**data, "ratio": row.ratio, **dataclasses.asdict(machine)})


def op_names() -> list[str]:
    """Modules of benches/ops that offer variants."""
    return sorted(p.stem for p in OPS.glob("*.py") if p.stem not in ("__init__", "base"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(op_names()), help="modules of benches/ops")
    parser.add_argument("--filter", default="", help="regex on 'operator variant'")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--json", type=Path, help="append JSON lines here")
    parser.add_argument("--best", action="store_true", help="print the best of each group only")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    """Exit code: 1 if a variant was wrong or raised, or the run is void."""
    options = parse(arguments)
    deadline = time.monotonic() + options.budget
    machine = measure_machine(torch.device("cuda"))
    print(
        f"{machine.gpu}: copy {machine.bandwidth_tbs:.2f} TB/s, "
        f"product {machine.matmul_tflops:.0f} TFLOP/s",
        flush=True,
    )
    print(f"{'operator':<18}{'variant':<70}{'us':>10}{'floor':>7}")
    names = [name for name in options.ops.split(",") if name]
    rows: list[Row] = []
    wanted = re.compile(options.filter)
    code = int(is_void(machine))
    for index, name in enumerate(names):
        try:
            variants = importlib.import_module(f"ops.{name}").variants()
            for row in measure_op(name, variants, machine, wanted, deadline):
                rows.append(row)
                report(row, machine, options)
        except DeviceLost as error:
            print(f"{name}: the device is lost ({error}); the rest in a new process", flush=True)
            code = max(code, restart(names[index + 1 :], options, deadline))
            break
        except Out as error:
            print(f"{name}: {error}; not measured: {', '.join(names[index + 1 :]) or 'its rest'}")
            break
        except (ImportError, AttributeError) as error:
            rows.append(Row(name, "(all)", wrong=describe(error)))
            report(rows[-1], machine, options)
        torch.cuda.empty_cache()
    print("best of each group")
    for row in best_rows(rows):
        print(row.text(), flush=True)
    return max(code, int(any(row.us is None for row in rows)))


def is_void(machine: Machine) -> bool:
    """Whether times mean nothing here; checks still do, and they go on."""
    try:
        check_machine(machine)
    except KDTreeError as error:
        print(error, flush=True)
        return True
    return False


def report(row: Row, machine: Machine, options: argparse.Namespace) -> None:
    """Print and keep one row."""
    if not options.best or row.us is None:
        print(row.text(), flush=True)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as out:
            print(json_line(row, machine), file=out)


def restart(names: list[str], options: argparse.Namespace, deadline: float) -> int:
    """Measure `names` in a process of their own, within what is left of the budget."""
    left = deadline - time.monotonic()
    if not names or left <= 0:
        return 1
    command = [sys.executable, __file__, "--ops", ",".join(names), "--filter", options.filter]
    command += ["--budget", str(left)] + (["--best"] if options.best else [])
    command += ["--json", str(options.json)] if options.json else []
    return max(1, subprocess.call(command))


if __name__ == "__main__":
    sys.exit(main())
