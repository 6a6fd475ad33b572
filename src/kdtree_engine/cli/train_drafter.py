"""`kdtree train-drafter`: a DFlash drafter for one target, from text."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from kdtree_engine.cli.threads import set_threads

if TYPE_CHECKING:
    from kdtree_engine.training import TrainReport

RUN, SHAPE, RECIPE = (
    Group(name, sort_key=place) for place, name in enumerate(("Run", "Drafter", "Recipe"))
)


def _option(group: Group, text: str, metavar: str) -> Parameter:
    return Parameter(help=text, group=group, metavar=metavar)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Options of `kdtree train-drafter`: fields of `training.TrainOptions`, with its defaults."""

    steps: Annotated[int, _option(RUN, "Optimiser steps at most.", "N")] = 2000
    seconds: Annotated[float, _option(RUN, "Stop after so long; 0: steps alone.", "S")] = 0.0
    device: Annotated[str, _option(RUN, "auto, cpu or cuda.", "D")] = "auto"
    seed: Annotated[int, _option(RUN, "Of the first weights and of the windows.", "S")] = 0

    layers: Annotated[int, _option(SHAPE, "Layers.", "N")] = 2
    block_size: Annotated[int, _option(SHAPE, "Slots of a block: the root and drafts.", "N")] = 8
    taps: Annotated[int, _option(SHAPE, "Target layers that it reads.", "N")] = 3
    head_dim: Annotated[int, _option(SHAPE, "Width of a head.", "N")] = 64
    heads: Annotated[int | None, _option(SHAPE, "Query heads.", "N")] = None
    kv_heads: Annotated[int | None, _option(SHAPE, "Key and value heads.", "N")] = None
    intermediate: Annotated[int | None, _option(SHAPE, "Width of the MLP.", "N")] = None

    length: Annotated[int, _option(RECIPE, "Tokens of a sequence.", "N")] = 512
    batch: Annotated[int, _option(RECIPE, "Sequences a step.", "N")] = 4
    anchors: Annotated[int, _option(RECIPE, "Blocks a sequence.", "N")] = 64
    learning_rate: Annotated[float, _option(RECIPE, "Peak learning rate.", "R")] = 6e-4
    warm_up: Annotated[float, _option(RECIPE, "Share of the run in which it rises.", "W")] = 0.04
    decay: Annotated[float, _option(RECIPE, "Share in which it falls to zero.", "W")] = 0.3
    weight_decay: Annotated[float, _option(RECIPE, "AdamW's weight decay.", "W")] = 0.01
    gamma: Annotated[float, _option(RECIPE, "Slot k weighs exp(-(k - 1) / gamma).", "G")] = 4.0
    distil: Annotated[
        float, _option(RECIPE, "Share of the loss that follows the target's distribution.", "W")
    ] = 0.5


def train_drafter(
    model: str,
    /,
    *,
    data: Annotated[
        list[str],
        Parameter(
            help="UTF-8 text, .jsonl documents, or .npy token ids.",
            metavar="FILE...",
            consume_multiple=(1, None),
            negative=(),
        ),
    ],
    out: Annotated[str, Parameter(help="A new folder for the drafter.", metavar="DIR")] = "drafter",
    options: TrainArguments | None = None,
) -> None:
    """Train a DFlash drafter for a target, on text or token ids.

    Parameters
    ----------
    model
        The target's folder, or its name in Hugging Face's cache (ORG/NAME).
    """
    from kdtree_engine import training
    from kdtree_engine.checkpoints import find_folder

    set_threads()
    report = training.train_drafter(
        find_folder(model),
        [Path(name) for name in data],
        Path(out),
        training.TrainOptions(**asdict(options or TrainArguments())),
    )
    print(f"kdtree: {summary(report)}; wrote {out}", file=sys.stderr)


def summary(report: TrainReport) -> str:
    """The line that ends a training run."""
    return (
        f"{report.steps} steps over {report.tokens} tokens in {report.seconds:.0f} s, "
        f"loss {report.loss:.3f}; held out: first guess right {report.accuracy[0]:.0%}, "
        f"{report.chain:.2f} tokens/step as a chain"
    )
