"""Checkpoints: Hugging Face folders as published, read lazily and checked whole at once.

`open_model` and `open_drafter` are the way in, `find_folder` turns names of downloads into folders;
`write` makes folders in the same formats.
"""

from __future__ import annotations

from kdtree_engine.checkpoints.drafter_config import check_drafter
from kdtree_engine.checkpoints.hub import find_folder
from kdtree_engine.checkpoints.load import ExpertTensors, ModelCheckpoint, open_model
from kdtree_engine.checkpoints.load_drafter import DrafterCheckpoint, open_drafter

__all__ = [
    "DrafterCheckpoint",
    "ExpertTensors",
    "ModelCheckpoint",
    "check_drafter",
    "find_folder",
    "open_drafter",
    "open_model",
]
