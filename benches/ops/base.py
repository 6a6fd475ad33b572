"""How one operator is timed: variants of its launch, each checked before it is timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kdtree_engine.kernels.launch import recording


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to run an operator.

    run: enqueues one call on layer i's weights; i runs over `layers`, so that the L2 is cold.
    check: None if the results are right (against the reference, and the same bits as the other
    variants), else what is wrong. bytes, flops: what one call must move and compute at least.
    """

    name: str
    run: Callable[[int], object]
    check: Callable[[], str | None]
    layers: int
    bytes: float
    flops: float = 0.0


def graph_of(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`step` captured, after one call that compiles everything."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with recording(graph):
        step()
    return graph


def median_us(step: Callable[[], object], repeats: int = 20) -> float:
    """Median microseconds of one replay of `step`."""
    graph = graph_of(step)
    graph.replay()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """TB/s of an elementwise kernel, bytes read and written."""
    source = torch.zeros(1 << 29, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return moved / median_us(lambda: torch.add(source, 1, out=target)) / 1e6


def matmul_rate() -> float:
    """TFLOP/s of an 8192^3 bf16 product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / median_us(lambda: torch.mm(a, b, out=out), 10) / 1e6
