"""Where a step's kernels spend their time: Nsight Compute over one eager step of K2.6's share.

    python benches/profile_step.py [--rows 1,8,64] [--context 4096] [--json FILE]

Three layers of one rank of eight, random weights. Every kernel is profiled alone, with cold caches
and the clocks as they are, so its time is more than in a graph, where the next one's launch is
hidden; what counts is what limits it. One line a kernel and grid: microseconds, the share of the
memory's and of the SMs' peak, warps that are resident, registers a thread.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps",
    "launch__registers_per_thread": "registers",
}
TO_US = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}


@dataclass
class Row:
    """A kernel of one grid: how often it ran, and the means of its metrics."""

    kernel: str
    grid: str
    calls: int
    values: dict[str, float]

    def text(self) -> str:
        """A line of the table."""
        v = self.values
        return (
            f"{self.kernel:<26}{self.grid:<18}{self.calls:>4}{v['us']:>9.2f}"
            f"{v['dram']:>7.0f}{v['sm']:>6.0f}{v['warps']:>7.0f}{v['registers']:>6.0f}"
        )


def one_step(rows: int, context: int) -> None:
    """A step between the profiler's start and stop, after two that compile and warm up."""
    from kdtree_engine.cache import CacheLayout
    from kdtree_engine.config import PAGE_SIZE
    from kdtree_engine.engine.measure.decoding import brooms, decoding, random_pool
    from kdtree_engine.engine.measure.shapes import shape, share
    from kdtree_engine.engine.measure.weights import APART, random_target

    config = share(shape("kimi-k2.6", 3), 8)
    with torch.inference_mode():
        target = random_target(config, torch.bfloat16, torch.device("cuda"), embedding=APART)
        layout = CacheLayout(config.max_positions // PAGE_SIZE, 1)
        pool = random_pool(target, layout, torch.bfloat16)
        roots, blocks = brooms(1, rows, config.vocab_size)
        step = decoding(target, pool, rows, roots, blocks, eager=True)
        step.stand(context)
        for _ in range(2):
            step.operators()
            step.reset()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        step.operators()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def read(text: str) -> list[Row]:
    """Rows of ncu's raw CSV, the longest first; kernels of one name and grid together."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.reader(lines))
    names, units = table[0], table[1]
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for line in table[2:]:
        cells = dict(zip(names, line, strict=True))
        scale = dict(zip(names, units, strict=True))
        values = {}
        for metric, short in METRICS.items():
            value = float(cells[metric].replace(",", ""))
            values[short] = value * (TO_US[scale[metric]] if short == "us" else 1.0)
        found[(cells["Kernel Name"].split("(")[0], cells["Grid Size"])].append(values)
    rows = [
        Row(
            kernel,
            grid.replace(" ", ""),
            len(calls),
            {name: sum(call[name] for call in calls) / len(calls) for name in calls[0]},
        )
        for (kernel, grid), calls in found.items()
    ]
    return sorted(rows, key=lambda row: -row.values["us"] * row.calls)


def profile(rows: int, context: int) -> list[Row]:
    """The kernels of one step, by ncu in a process of its own."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--page", "raw", "--metrics", ",".join(METRICS)]
    command += [sys.executable, __file__, "--step", str(rows), "--context", str(context)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"ncu ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"
        )
    return read(done.stdout)


def main(arguments: list[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="append JSON lines here")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)  # the profiled process
    options = parser.parse_args(arguments)
    if options.step is not None:
        one_step(options.step, options.context)
        return 0
    for count in map(int, options.rows.split(",")):
        print(f"{count} rows, context {options.context}: 3 layers, head and sampling")
        print(
            f"{'kernel':<26}{'grid':<18}{'n':>4}{'us':>9}{'dram%':>7}{'sm%':>6}{'warps%':>7}{'regs':>6}"
        )
        for row in profile(count, options.context):
            print(row.text())
            if options.json is not None:
                line: dict[str, Any] = {"bench": "profile", "rows": count}
                line |= {"context": options.context, "kernel": row.kernel, "grid": row.grid}
                line |= {"calls": row.calls, **row.values}
                with options.json.open("a", encoding="utf-8") as out:
                    print(json.dumps(line), file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
