"""Train the packaged target on one GPU within a fixed time, quantise it and export it.

The clock, not a step count, drives the schedule, so that the export is always reached: constant
learning rate to 60%, then linear decay; INT4 fake quantisation of the routed experts in the last
third, while the rate is still high enough to adapt.

    python recipes/demo/train_target.py --corpus .corpus --vocabulary .corpus/vocabulary \\
        --out "$OUT" --seconds 565
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import export
import numpy as np
import optimiser
import target_model
import tokens as data
import torch

STARTED = time.monotonic()


@dataclass
class Settings:
    """What a run can be told."""

    rate: float = 5e-3
    adam: float = 3e-3
    decay: float = 0.1
    batch: int = 32
    length: int = 2048
    warm: float = 0.02
    constant: float = 0.6
    quantised: float = 0.66
    balance: float = 0.001


def rate_at(progress: float, settings: Settings) -> float:
    """Fraction of the peak learning rate: warm up, hold, decay to nothing."""
    if progress < settings.warm:
        return max(progress / settings.warm, 0.01)
    if progress < settings.constant:
        return 1.0
    return max((1 - progress) / (1 - settings.constant), 0.0)


class Training:
    """One run: model, optimisers, data, and a log of what happened."""

    def __init__(self, arrays: dict[str, np.ndarray], settings: Settings, compiled: bool) -> None:
        self.settings = settings
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        self.trainee = target_model.Trainee(
            target_model.build(target_model.TEXT), self.device, compiled
        )
        hidden, rest = optimiser.split(self.trainee.model)
        self.muon = optimiser.Muon(hidden, settings.decay)
        fused = self.device == "cuda"
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self.arrays = arrays
        size = (settings.length, settings.batch)
        self.sampler = data.Sampler(arrays["train"], *size, self.device, seed=0)
        self.steps = 0
        self.log: list[dict[str, float]] = []

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.steps * self.settings.batch * self.settings.length

    def step(self, progress: float) -> torch.Tensor:
        """One update; returns the loss without waiting for it."""
        loss = self.trainee.losses(self.sampler.next()).mean()
        loss.backward()
        fraction = rate_at(progress, self.settings)
        for group in self.adam.param_groups:
            group["lr"] = self.settings.adam * fraction
        self.adam.step()
        self.muon.step(self.settings.rate * fraction)
        for parameter in self.trainee.model.parameters():
            parameter.grad = None
        self.imbalance = self.trainee.balance(self.settings.balance)
        self.steps += 1
        return loss.detach()

    def run(self, begin: float, deadline: float) -> None:
        """Train until the deadline, waiting for the device every ten steps to keep time."""
        progress, mark, marked, total = 0.0, time.monotonic(), self.steps, 0.0
        before: dict[str, Any] = {}
        while progress < 1.0:
            loss = self.step(progress)
            if self.steps % 10 == 0 or self.steps < 3:
                total = float(loss)
                progress = (time.monotonic() - begin) / (deadline - begin)
            if progress >= self.settings.quantised and not before:
                before = self.evaluate()
                self.log.append({"step": self.steps, **before})
                print("before quantisation-aware training", before, flush=True)
                self.trainee.switch.fill_(1.0)
            if self.steps in (1, 2, 10, 50, 100, 200) or self.steps % 250 == 0:
                seconds = time.monotonic() - mark
                speed = (self.steps - marked) * self.settings.batch * self.settings.length / seconds
                mark, marked = time.monotonic(), self.steps
                self.record(total if self.steps % 10 == 0 else float(loss), progress, speed)

    def record(self, loss: float, progress: float, speed: float) -> None:
        """One line of the log."""
        row = {
            "step": self.steps, "loss": round(loss, 4), "progress": round(progress, 3),
            "tokens_per_second": round(speed), "imbalance": round(float(self.imbalance), 2),
        }
        self.log.append(row)
        print(f"{time.monotonic() - STARTED:6.1f} s  {row}", flush=True)

    def evaluate(self) -> dict[str, float]:
        """Held-out and validation loss (nats a token), with and without INT4 experts.

        Gradients stay on: without them every layer would be compiled a second time.
        """
        found = {}
        kept = float(self.trainee.switch)
        loads = [moe.load.clone() for moe in self.trainee.moes]
        for name in ("heldout", "validation"):
            for label, value in (("bf16", 0.0), ("int4", 1.0)):
                self.trainee.switch.fill_(value)
                found[f"{name}_{label}"] = round(self._loss(self.arrays[name]), 4)
        self.trainee.switch.fill_(kept)
        for moe, load in zip(self.trainee.moes, loads, strict=True):
            moe.load.copy_(load)
        return found

    def _loss(self, array: np.ndarray) -> float:
        """Mean loss over whole windows of a text."""
        batch, length = self.settings.batch, self.settings.length
        rows = max((len(array) - 1) // length, 1)
        losses: list[torch.Tensor] = []
        for piece in data.windows(array, length, batch, self.device):
            losses += self.trainee.losses(piece).detach().view(batch, length).mean(1)
        return float(torch.stack(losses[:rows]).mean())


def check_forward(training: Training) -> float:
    """Largest difference between our experts' forward and transformers', in logit spreads."""
    trainee = training.trainee
    model = target_model.build(target_model.TEXT).to(training.device)
    model.load_state_dict(trainee.model.state_dict())
    piece = training.sampler.next()[:2, :129]
    with torch.no_grad():
        expected = model(input_ids=piece[:, :-1], use_cache=False).logits.float()
        expected = torch.nn.functional.cross_entropy(
            expected.flatten(0, 1), piece[:, 1:].flatten(), reduction="none"
        )
        kept = trainee.head, trainee.mixed
        trainee.head, trainee.mixed = trainee._head, False
        found = trainee.losses(piece)
        trainee.head, trainee.mixed = kept
    return float((found - expected).abs().max() / expected.std())


def finish(training: Training, args: argparse.Namespace, seconds: float) -> None:
    """Round to the exported values, evaluate once more, export, write the report."""
    after = training.evaluate()
    print("after", after, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    size = export.save(training.trainee.model, args.out)
    export.copy_vocabulary(args.vocabulary, args.out)
    sizes = [int(x) for x in training.arrays["sizes"]]
    report = {
        "settings": vars(training.settings), "steps": training.steps, "tokens": training.tokens,
        "train_seconds": round(seconds, 1), "losses": after, "weights_bytes": size,
        "corpus_tokens": {n: len(training.arrays[n]) for n in ("train", "heldout", "validation")},
        "dialogue_tokens": int(training.arrays["dialogue_tokens"]),
        "corpus_bytes": dict(zip(("train", "heldout", "validation"), sizes, strict=True)),
        "parameters": sum(p.numel() for p in training.trainee.model.parameters()),
        "torch": torch.__version__, "log": training.log,
    }
    (args.out / "target_report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"exported {size} bytes after {time.monotonic() - STARTED:.0f} s", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--vocabulary", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="from start to export")
    parser.add_argument("--reserve", type=float, default=25.0, help="seconds kept for the export")
    parser.add_argument("--cache", type=Path, help="file that keeps the tokens for a second run")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    for name, value in vars(Settings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def main() -> None:
    """Tokenise, train to the deadline, export."""
    args = arguments()
    torch.set_float32_matmul_precision("high")
    settings = Settings(**{name: getattr(args, name) for name in vars(Settings())})
    workers = min(os.cpu_count() or 1, 12)
    arrays = data.load(args.corpus, args.vocabulary / "tiktoken.model", workers, args.cache)
    sizes = {name: len(arrays[name]) for name in ("train", "heldout", "validation")}
    print(f"{time.monotonic() - STARTED:6.1f} s  tokens {sizes}", flush=True)
    training = Training(arrays, settings, compiled=not args.eager)
    print(f"experts' forward differs by {check_forward(training):.2e}", flush=True)
    training.step(0.0)  # compile before the clock of the schedule starts
    training.evaluate()
    begin, deadline = time.monotonic(), STARTED + args.seconds - args.reserve
    print(f"{begin - STARTED:6.1f} s  compiled", flush=True)
    if deadline <= begin:
        raise SystemExit(f"no time is left to train: --seconds is {args.seconds:.0f}; give more")
    training.run(begin, deadline)
    finish(training, args, time.monotonic() - begin)


if __name__ == "__main__":
    main()
