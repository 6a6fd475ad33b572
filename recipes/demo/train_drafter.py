"""Train the packaged drafter on the generated text and a share of the corpus.

The same call as `kdtree train-drafter`, with the packaged settings; it runs where the command's own
libraries are missing, too.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch

from kdtree_engine.training import TrainOptions, train_drafter


def main() -> None:
    """Train, write the drafter's folder and its report."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2.5e-3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_float32_matmul_precision("high")
    options = TrainOptions(
        steps=args.steps,
        seconds=args.seconds,
        layers=2,
        block_size=8,
        head_dim=64,
        heads=4,
        kv_heads=2,
        intermediate=512,
        taps=3,
        length=args.length,
        batch=args.batch,
        anchors=args.anchors,
        learning_rate=args.rate,
        decay=0.5,
        distil=0.5,
        log_every=500,
    )
    report = train_drafter(args.target, args.data, args.out, options)
    args.report.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    print(json.dumps(report.to_dict()))


if __name__ == "__main__":
    main()
