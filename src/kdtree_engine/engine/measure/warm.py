"""Compile a step's kernels before it is built: two layers have all of them, and processes of their
own, one a row count, do it at the same time. What they compile lies in Triton's cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdtree_engine.engine.measure.step import Options

LAYERS = 2  # a dense one and one with experts


def warm(options: Options, counts: Sequence[int], say: Callable[[str], None]) -> None:
    """One process for each of `counts` rows. One that fails costs time later and no more."""
    began = time.perf_counter()
    running = []
    for rows in counts:
        layers = min(LAYERS, options.layers or LAYERS)
        one = replace(options, rows=(rows,), layers=layers, split=False, free=False)
        command = [sys.executable, "-m", "kdtree_engine.engine.measure.warm"]
        running.append(subprocess.Popen([*command, json.dumps(asdict(one))]))
    try:
        failed = [rows for rows, one in zip(counts, running, strict=True) if one.wait()]
    finally:
        for process in running:  # none outlives an interrupted bench
            process.terminate()
    say(f"compiled in {time.perf_counter() - began:.0f} s")
    if failed:
        say(f"not compiled beforehand, for an error above: steps of {failed} rows")


def main(arguments: Sequence[str]) -> None:
    """One of the processes."""
    from kdtree_engine.engine.measure.step import Options, compile_kernels

    compile_kernels(Options(**json.loads(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
