"""Training of DFlash drafters, on the inference network itself."""

from __future__ import annotations

from kdtree_engine.training.options import TrainOptions, TrainReport
from kdtree_engine.training.run import train_drafter

__all__ = ["TrainOptions", "TrainReport", "train_drafter"]
