"""What a training run is told, and what it reports."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from kdtree_engine.config import MAX_SEED
from kdtree_engine.errors import OptionError


@dataclass(frozen=True)
class TrainOptions:
    """Shape of the new drafter and the recipe (DFlash, arXiv 2602.06036).

    steps or seconds, whichever ends first (0 seconds: steps alone). heads None: the target's
    hidden width over head_dim. A step sees `batch` sequences of `length` tokens with `anchors`
    blocks each. gamma: slot k weighs exp(-(k - 1) / gamma). distil: share of the loss that
    compares with the target's own distribution instead of the next token.
    """

    steps: int = 2000
    seconds: float = 0.0
    layers: int = 2
    block_size: int = 8
    head_dim: int = 64
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    taps: int = 3
    length: int = 512
    batch: int = 4
    anchors: int = 64
    learning_rate: float = 6e-4
    weight_decay: float = 0.01
    warm_up: float = 0.04
    decay: float = 0.3
    clip: float = 1.0
    gamma: float = 4.0
    distil: float = 0.5
    seed: int = 0
    device: str = "auto"
    log_every: int = 100

    def check(self, max_positions: int) -> None:
        """Raise OptionError for values that cannot work together."""
        for name in ("steps", "layers", "head_dim", "taps", "batch", "anchors", "log_every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} {getattr(self, name)} must be 1 or more")
        for name in ("gamma", "clip"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name} {getattr(self, name)} must be a number over 0")
        for name in ("seconds", "weight_decay"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise OptionError(f"{name} {getattr(self, name)} must be a number from 0 on")
        if not 0 <= self.seed <= MAX_SEED:
            raise OptionError(f"seed {self.seed} must be from 0 to 2^63 - 1")
        for name in ("learning_rate", "warm_up", "decay"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise OptionError(f"{name} {getattr(self, name)} must be over 0 and at most 1")
        if self.block_size < 2:
            raise OptionError(
                f"block_size {self.block_size} must be 2 or more: the root and a draft"
            )
        if not self.block_size < self.length <= max_positions:
            raise OptionError(
                f"length {self.length} must be over the block size {self.block_size} and at most "
                f"the model's {max_positions} positions"
            )
        if not 0.0 <= self.distil <= 1.0:
            raise OptionError(f"distil {self.distil} must be between 0 and 1")


@dataclass(frozen=True)
class TrainReport:
    """loss: the last mean. accuracy: share of right first guesses per slot, on held-out windows.

    chain: mean tokens a chain draft would give per step there, 1 + expected right guesses in a row.
    """

    steps: int
    seconds: float
    tokens: int
    parameters: int
    loss: float
    accuracy: list[float]
    chain: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
