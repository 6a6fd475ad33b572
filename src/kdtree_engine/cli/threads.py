"""KDTREE_THREADS, for the commands that compute."""

from __future__ import annotations

from kdtree_engine.env import read_environment


def set_threads() -> None:
    """Give torch the asked-for number of CPU threads; without one, torch decides. Imports torch."""
    threads = read_environment().threads
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
