"""What every Triton kernel of the package needs around it: when kernels run, and how they start.

A kernel runs for tensors on a CUDA device, and, in tests, for CPU tensors under Triton's
interpreter. Kernels start by programmatic dependent launch where the device has it (sm_90 on): a
grid's blocks are placed while the grid before still runs, and every kernel waits for that one
before it touches memory that the step writes (`begin` in kernels/prologue.py).
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SMALLEST_SHARED_MEMORY = 101_376
"""Bytes of shared memory a block may take on sm_120, the least of the devices supported."""


_ONE_RECORDS = threading.RLock()  # a recording inside another is an error of CUDA, no deadlock


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record into `graph` what this thread launches. pool: as of torch.cuda.graph.

    Garbage is collected before and not meanwhile: a dead engine's graphs, freed while another one
    is recorded, spoil it (CUDA: "operation failed due to a previous error during capture"). What
    other threads do with the device is neither recorded nor forbidden.
    """
    with _ONE_RECORDS:
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                yield
        finally:
            if collects:
                gc.enable()


def has_kernel(x: Tensor) -> bool:
    """Whether operators on `x` run as kernels: on CUDA, unless gradients are being recorded."""
    return x.is_cuda and not torch.is_grad_enabled()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """SMs of the device; 132, an H200's, where there is none (the interpreter)."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def small_memory(device: torch.device) -> bool:
    """Whether a block has SMALLEST_SHARED_MEMORY only, as on sm_120; 227 KB elsewhere."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (12, 0)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is an sm_90, whose kernels may use wgmma and the copy engine by hand."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def launch_options(x: Tensor) -> dict[str, Any]:
    """Keyword arguments of every launch: PDL (the kernel's constexpr) and its launch attribute."""
    on = _dependent_launch(x.device)
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


def precise(x: Tensor) -> bool:
    """Whether products of `x` need IEEE float32 (PRECISE): the tensor cores would round to tf32."""
    return x.dtype == torch.float32
