"""Run decode steps: as they stand, or captured once in CUDA graphs and replayed.

A graph is captured for a number of places and a number of rows, the **bucket**; a step of fewer
requests is filled up with the dummy place. All graphs share one memory pool: they never run at the
same time, and whatever a step leaves in the pool is dead when the next one starts, but for the
record, and the logits where they are kept for tests, which each graph keeps to itself.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_engine.engine.record import Record, unpack, width
from kdtree_engine.engine.request import Request
from kdtree_engine.engine.state import upload
from kdtree_engine.engine.step import (
    PLAIN,
    StepOptions,
    StepOutput,
    StepParts,
    Stopwatch,
    decode_step,
    path_length,
)
from kdtree_engine.kernels.launch import recording
from kdtree_engine.log import progress
from kdtree_engine.types import DraftBlocks

log = logging.getLogger(__name__)

MOST_FLIGHTS = 2
"""Steps that may be under way at once: one runs while the host reads the one before it."""

# Places, rows, whether a host drafter's blocks come with the step, what else it does.
_Key = tuple[int, int, bool, StepOptions]


@dataclass(frozen=True, eq=False)
class Flight:
    """A step that was launched. record: [B, W] int64 in host memory, filled once `ready`. began:
    when the host launched it.
    """

    requests: tuple[Request, ...]
    rows: int
    record: Tensor
    ready: torch.cuda.Event | None
    logits: Tensor | None
    watch: Stopwatch
    began: float


@dataclass(frozen=True, eq=False)
class Landing:
    """A step that has ended. logits: [B * rows, V] where the runner keeps them."""

    requests: tuple[Request, ...]
    records: list[Record]
    rows: int
    logits: Tensor | None
    seconds: dict[str, float]


@dataclass(frozen=True, eq=False)
class _Captured:
    """A graph, the tensors that it reads, and those that it writes."""

    graph: torch.cuda.CUDAGraph
    places: Tensor
    blocks: DraftBlocks | None
    out: StepOutput


class Runner:
    """Launches steps and collects what they did, in order.

    keep_logits: for tests, each step's logits are copied and land with it.
    """

    def __init__(self, parts: StepParts, most_requests: int, eager: bool) -> None:
        self._parts = parts
        self._most = most_requests
        self._cuda = parts.device.type == "cuda"
        self.captures = self._cuda and not eager
        self.keep_logits = False
        self._flights: deque[Flight] = deque()
        self._graphs: dict[_Key, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None
        self._launched = 0
        self._landed = 0.0  # when the last step was collected
        self._ring: list[Tensor] = []
        if self._cuda:
            rows = self._most_rows
            size = most_requests * width(rows, path_length(parts.drafter, rows), True)
            self._ring = [
                torch.empty(size, dtype=torch.int64, pin_memory=True) for _ in range(MOST_FLIGHTS)
            ]

    @property
    def _most_rows(self) -> int:
        return self._parts.policy.most_rows(self._parts.drafter.horizon)

    @property
    def in_flight(self) -> int:
        """Steps launched and not collected."""
        return len(self._flights)

    def flights_of(self, request: Request) -> int:
        """In how many of them a request is."""
        return sum(request in flight.requests for flight in self._flights)

    def bucket(self, requests: int, rows: int) -> tuple[int, int]:
        """Places and rows of the step that serves so many: exact, or a graph's."""
        if not self.captures:
            return requests, rows
        places = min(self._most, 1 << (requests - 1).bit_length())
        return places, 1 if rows == 1 else self._most_rows

    def graph(self, requests: int, rows: int, given: bool) -> torch.cuda.CUDAGraph:
        """The graph of a plain step that was launched before, its inputs the last launch's: for
        measuring it alone. given: whether a host drafter's blocks came with the step.
        """
        return self._graphs[(*self.bucket(requests, rows), given, PLAIN)].graph

    def prepare(
        self,
        requests: int,
        rows: int,
        blocks: DraftBlocks | None,
        options: StepOptions = PLAIN,
    ) -> None:
        """Capture the graph of such a step now, if there is none yet; the rest is as in `launch`.

        Whoever streams text does not want to wait, or to see a progress bar, inside a sentence.
        """
        if self.captures:
            self._graph_of((*self.bucket(requests, rows), blocks is not None, options), blocks)

    def launch(
        self,
        requests: Sequence[Request],
        rows: int,
        blocks: DraftBlocks | None,
        options: StepOptions = PLAIN,
    ) -> None:
        """Start a step of `rows` rows a request. blocks: on the host, of `bucket` places."""
        assert self.in_flight < MOST_FLIGHTS
        watch, began = Stopwatch(), time.perf_counter()
        places, rows = self.bucket(len(requests), rows)
        numbers = [request.place for request in requests]
        numbers += [self._parts.state.dummy] * (places - len(numbers))
        index = upload(torch.tensor(numbers), self._parts.device)
        if self.captures:
            out = self._replay((places, rows, blocks is not None, options), index, blocks)
        else:
            out = decode_step(self._parts, index, rows, self._moved(blocks), watch, options)
        logits = None
        if self.keep_logits:  # a graph's next replay would overwrite its own
            assert out.logits is not None
            logits = out.logits.clone() if self.captures else out.logits
        record, ready = out.record, None
        if self._cuda:
            # Read when the step before the last has been collected: its place in the ring is free.
            ring = self._ring[self._launched % MOST_FLIGHTS]
            host = ring[: record.numel()].view(record.shape)
            record, ready = host.copy_(record, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._launched += 1
        self._flights.append(Flight(tuple(requests), rows, record, ready, logits, watch, began))

    def collect(self) -> Landing:
        """Wait for the oldest step."""
        flight = self._flights.popleft()
        record, seconds = flight.record, flight.watch.seconds
        if flight.ready is not None:
            flight.ready.synchronize()
            record = record.clone()
            now = time.perf_counter()
            seconds = {"step": now - max(flight.began, self._landed)}
            self._landed = now
        length = path_length(self._parts.drafter, flight.rows)
        records = unpack(record[: len(flight.requests)], flight.rows, length)
        return Landing(flight.requests, records, flight.rows, flight.logits, seconds)

    def drop(self) -> None:
        """Forget the steps under way. The device still does them, before whatever comes next."""
        self._flights.clear()

    def _replay(self, key: _Key, places: Tensor, blocks: DraftBlocks | None) -> StepOutput:
        captured = self._graph_of(key, blocks)
        captured.places.copy_(places)
        if blocks is not None and captured.blocks is not None:
            captured.blocks.tokens.copy_(upload(blocks.tokens, self._parts.device))
            captured.blocks.log_probs.copy_(upload(blocks.log_probs, self._parts.device))
        captured.graph.replay()
        return captured.out

    def _graph_of(self, key: _Key, like: DraftBlocks | None) -> _Captured:
        known = self._graphs.get(key)
        if known is None or (self.keep_logits and known.out.logits is None):
            with progress("capturing a graph", 1) as meter:
                self._graphs[key] = self._capture(key, like)
                meter.advance(1)
        return self._graphs[key]

    def _capture(self, key: _Key, like: DraftBlocks | None) -> _Captured:
        """Warm up, then capture, both on the dummy place alone.

        The dummy has no token left to emit: its rows, its commits and its drafter's states go to
        the spill page, and its state stays what it was. So a warm-up may run while requests decode.
        """
        began = time.perf_counter()
        parts, (count, rows, _, options) = self._parts, key
        places = torch.full((count,), parts.state.dummy, dtype=torch.int64, device=parts.device)
        blocks = self._moved(like)
        side = torch.cuda.Stream(parts.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(parts.device))
        with torch.cuda.stream(side):
            decode_step(parts, places, rows, blocks, Stopwatch(), options)
        torch.cuda.current_stream(parts.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with recording(graph, self._pool):
            out = decode_step(parts, places, rows, blocks, Stopwatch(), options)
        log.info(
            "captured a step of %d requests with %d rows each in %.1f s",
            count,
            rows,
            time.perf_counter() - began,
        )
        if not self.keep_logits:  # a graph that holds its logits keeps the pool from reusing them
            out = StepOutput(out.record, None)
        return _Captured(graph, places, blocks, out)

    def _moved(self, blocks: DraftBlocks | None) -> DraftBlocks | None:
        """A host drafter's blocks on the device."""
        if blocks is None:
            return None
        device = self._parts.device
        return DraftBlocks(upload(blocks.tokens, device), upload(blocks.log_probs, device))
