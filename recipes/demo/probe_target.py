"""Short runs at several learning rates on the GPU, and a check that the export works.

The packaged model's rate was picked by these: each run is the whole schedule in a few seconds, so
the losses at the end compare. Everything the long run needs is exercised here first.

    python recipes/demo/probe_target.py --corpus .corpus --vocabulary .corpus/vocabulary \\
        --out "$OUT" --cache TOKENS.npz --rates 0.002 0.004 0.008 --each 15
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import tokens as data
import torch
import train_target


def main() -> None:
    """One short run a rate; the last one is exported."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--vocabulary", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    parser.add_argument("--each", type=float, default=15.0, help="seconds a run")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    workers = min(os.cpu_count() or 1, 12)
    arrays = data.load(args.corpus, args.vocabulary / "tiktoken.model", workers, args.cache)
    print(f"{time.monotonic() - train_target.STARTED:6.1f} s  tokens ready", flush=True)
    for i, rate in enumerate(args.rates):
        settings = train_target.Settings(rate=rate, batch=args.batch, length=args.length)
        training = train_target.Training(arrays, settings, compiled=not args.eager)
        if i == 0:
            print(f"experts' forward differs by {train_target.check_forward(training):.2e}")
        training.step(0.0)
        training.evaluate()
        begin = time.monotonic()
        print(f"{begin - train_target.STARTED:6.1f} s  rate {rate}", flush=True)
        training.run(begin, begin + args.each)
        print("rate", rate, "steps", training.steps, training.evaluate(), flush=True)
    if torch.cuda.is_available():
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    train_target.finish(training, args, args.each)


if __name__ == "__main__":
    main()
