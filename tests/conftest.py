"""Fixtures shared by the tests: small checkpoints on disk, and one pinned thread count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import CheckpointMaker
from interpreter import allow_device_loops

from kdtree_engine.checkpoints.write import make_checkpoint

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
    allow_device_loops()


@pytest.fixture(scope="session", autouse=True)
def pinned_threads() -> Iterator[None]:
    """The contract holds for a fixed thread count: the one that the command line asked for, or 1.

    Without this a test's outcome could depend on which tests ran before it in the process.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointMaker:
    """`checkpoint(family, **make_checkpoint options)`: the folder, made once. Do not write to it.

    A drafter, where asked for, lies in its subfolder `drafter`.
    """
    made: dict[str, Path] = {}

    def make(family: str = "k2.6", **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(family.replace(".", "-"))
            make_checkpoint(folder, family, **options)
            made[key] = folder
        return made[key]

    return make
