"""Times of captured steps, the rates of the machine, and time by kernel."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kdtree_engine.engine.measure.table import Machine
from kdtree_engine.errors import KDTreeError
from kdtree_engine.kernels.launch import recording

LEAST_COPY_TBS = 4.0
"""An H200 whose copy is slower is shared or throttled: nothing measured on it counts."""

Call = Callable[[], object]
Timed = tuple[Call, Call]
"""What sets the state back, not timed, and what is timed."""


def captured(step: Call, device: torch.device) -> Call:
    """What repeats `step`: the replay of a CUDA graph, on a CPU the step itself.

    The step runs once first, which compiles its kernels.
    """
    step()
    if device.type != "cuda":
        return step
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with recording(graph):
        step()
    return graph.replay


def median_ms(call: Call, device: torch.device, repeats: int) -> float:
    """Median milliseconds of `repeats` calls, after two that are not counted."""
    [found] = medians_ms([(_nothing, call)], device, repeats)
    return found


def medians_ms(calls: Sequence[Timed], device: torch.device, repeats: int) -> list[float]:
    """Median milliseconds of each call, in turns, `repeats` times after two that are not counted.

    On CUDA all of it is enqueued before anything is waited for: the device is never idle between
    the two events around a call, as it would be while the host launches a large graph.
    """
    spans: list[list[Callable[[], float]]] = [[] for _ in calls]
    for turn in range(repeats + 2):
        for (reset, call), span in zip(calls, spans, strict=True):
            reset()
            ms = _enqueue(call, device)
            if turn >= 2:
                span.append(ms)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [statistics.median(ms() for ms in span) for span in spans]


def _enqueue(call: Call, device: torch.device) -> Callable[[], float]:
    """Milliseconds of a call, to be asked for once the device is through with it."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        spent = (time.perf_counter() - start) * 1e3
        return lambda: spent
    begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    return lambda: float(begin.elapsed_time(end))


def _nothing() -> None:
    """A call without state."""


def measure_machine(device: torch.device) -> Machine:
    """Rates and names."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    copy = _copy_tbs(device, 1 << (29 if cuda else 22))
    product = _matmul_tflops(device, 8192 if cuda else 512)
    if cuda:
        torch.cuda.empty_cache()
    return Machine(name, _commit(), torch.__version__, _version("triton"), copy, product)


def check_machine(machine: Machine) -> None:
    """Raise KDTreeError for an H200 that copies too slowly."""
    if "H200" in machine.gpu and machine.bandwidth_tbs < LEAST_COPY_TBS:
        raise KDTreeError(
            f"this run is void: an elementwise copy on {machine.gpu} gave "
            f"{machine.bandwidth_tbs:.2f} TB/s, and at least {LEAST_COPY_TBS} is expected of an "
            "undisturbed one"
        )


def _copy_tbs(device: torch.device, count: int) -> float:
    """TB/s of an elementwise kernel, bytes read and written."""
    source = torch.zeros(count, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    call = captured(lambda: torch.add(source, 1, out=target), device)
    return moved / median_ms(call, device, 20) / 1e9


def _matmul_tflops(device: torch.device, size: int) -> float:
    """TFLOP/s of a square bf16 product (float32 on a CPU) of random data."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    call = captured(lambda: torch.mm(a, b, out=out), device)
    return 2.0 * size**3 / median_ms(call, device, 10) / 1e9


def time_by_kernel(call: Call, device: torch.device, repeats: int = 3) -> dict[str, float]:
    """Milliseconds of one call by kernel and grid (on a CPU by torch operator).

    The grid tells products of different weights apart, which one kernel computes.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    call()
    with profile(activities=activities) as found:
        for _ in range(repeats):
            call()
        if cuda:
            torch.cuda.synchronize(device)
    if cuda:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return kernel_times(events, repeats)
    spent: dict[str, float] = defaultdict(float)
    for event in found.events() or ():
        spent[event.name] += event.self_cpu_time_total / 1e3 / repeats
    return {name: total for name, total in spent.items() if total > 0}


def kernel_times(events: Sequence[Mapping[str, Any]], repeats: int) -> dict[str, float]:
    """Milliseconds by kernel name and grid, one of `repeats`, from a Chrome trace's events."""
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = event["name"].split("<")[0].removeprefix("void ").rsplit("::", 1)[-1]
        grid = event.get("args", {}).get("grid")
        label = f"{name} {'x'.join(map(str, grid))}" if grid else name
        spent[label] += event["dur"] / 1e3 / repeats
    return dict(spent)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree that runs; None where it was installed without one."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
