"""`kdtree bench step`: one rank's share of a model, one decode step, rows by context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kdtree_engine.cache.layout import pages_for
from kdtree_engine.config import MAX_ROWS_PER_REQUEST, ModelConfig
from kdtree_engine.engine.measure import gate
from kdtree_engine.engine.measure.floor import Step, floor_by_operator, floor_ms, step_work
from kdtree_engine.engine.measure.shapes import shape, share
from kdtree_engine.engine.measure.table import (
    HEADER,
    Machine,
    Measurement,
    heading,
    json_line,
    rows_per_request,
    split_rows,
    table_row,
)
from kdtree_engine.engine.measure.timing import (
    captured,
    check_machine,
    measure_machine,
    median_ms,
    time_by_kernel,
)
from kdtree_engine.engine.measure.verify import Cache, Verification, random_cache, verification
from kdtree_engine.engine.measure.weights import random_target
from kdtree_engine.engine.memory import free_bytes, page_bytes
from kdtree_engine.errors import OptionError
from kdtree_engine.model import Kimi, moe

Say = Callable[[str], None]

_SPARE_BYTES = 6 << 30  # for activations, graphs and the allocator


@dataclass(frozen=True)
class Options:
    """What to measure; rows are those of all requests together."""

    shape: str
    rank_of: int = 1
    layers: int | None = None
    requests: int = 1
    routing: str = "uniform"
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (0, 4096, 32_768, 131_072)
    split: bool = False
    repeats: int = 20
    temperature: float = 0.0
    seed: int = 0


def run(options: Options, say: Say, write: Say) -> list[Measurement]:
    """Check, build, measure. `say` gets lines for the reader, `write` JSON lines."""
    config, counts, contexts = plan(options)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    with torch.inference_mode():
        machine = measure_machine(device)
        check_machine(machine)
        shallow = replace(config, num_layers=min(gate.LAYERS, config.num_layers))
        gate.check_rows(_build(shallow, options, dtype, device), dtype)
        say(f"gate passed: {gate.ROWS} rows of {shallow.num_layers} layers, bits of plain decoding")
        target = _build(config, options, dtype, device)
        contexts, cache = _cache(target, options, contexts, dtype, say)
        for line in heading(
            options.shape, options.rank_of, config.num_layers, options.requests, machine
        ):
            say(line)
        say(HEADER)
        found = []
        for rows in counts:
            for one in _measure(target, cache, options, rows, contexts, machine):
                found.append(one)
                say(table_row(one))
                for line in split_rows(one) if options.split else ():
                    say(line)
                write(json_line(one, machine))
    return found


def plan(options: Options) -> tuple[ModelConfig, list[int], list[int]]:
    """The share's config, row counts and contexts. OptionError for what cannot be measured."""
    config = share(shape(options.shape, options.layers), options.rank_of)
    counts = rows_per_request(options.rows, max(1, options.requests), MAX_ROWS_PER_REQUEST)
    if options.requests < 1 or len(counts) < len(options.rows) or not counts:
        raise OptionError(
            f"--rows {','.join(map(str, options.rows))}: each must be a multiple of --requests "
            f"{options.requests}, of 1 to {MAX_ROWS_PER_REQUEST} rows a request"
        )
    most = config.max_positions - MAX_ROWS_PER_REQUEST
    contexts = [context for context in options.contexts if 0 <= context <= most]
    if len(contexts) < len(options.contexts) or not contexts:
        raise OptionError(
            f"--contexts {','.join(map(str, options.contexts))}: each must be from 0 to {most}"
        )
    if options.repeats < 1 or not 0.0 <= options.temperature < float("inf"):
        raise OptionError("--repeats must be 1 or more, and --temperature 0 or more")
    return config, counts, contexts


def _build(config: ModelConfig, options: Options, dtype: torch.dtype, device: torch.device) -> Kimi:
    return random_target(config, dtype, device, options.routing, options.seed)


def _cache(
    target: Kimi, options: Options, contexts: Sequence[int], dtype: torch.dtype, say: Say
) -> tuple[list[int], Cache]:
    """The contexts that memory allows, and a cache for the longest of them."""
    if target.embedding.is_cuda:
        torch.cuda.empty_cache()
    size = page_bytes(target.config, None, dtype) * options.requests
    free = free_bytes(target.device)
    fitting = [
        context
        for context in contexts
        if free is None or _pages(context) * size < free - _SPARE_BYTES * target.embedding.is_cuda
    ]
    if len(fitting) < len(contexts):
        say(f"left out for lack of memory: contexts {sorted({*contexts} - {*fitting})}")
    if not fitting:
        raise OptionError("no context of --contexts fits into the memory that is free")
    cache = random_cache(target, options.requests, _pages(max(fitting)), dtype)
    return fitting, cache


def _pages(context: int) -> int:
    """Pages of one request: its context and what a step may commit."""
    return pages_for(context + MAX_ROWS_PER_REQUEST)


def _measure(
    target: Kimi,
    cache: Cache,
    options: Options,
    rows: int,
    contexts: Sequence[int],
    machine: Machine,
) -> Iterator[Measurement]:
    """One graph for all contexts, as the engine has it."""
    requests, device = options.requests, target.device
    step = verification(
        target, cache, requests, rows // requests, options.temperature, options.seed
    )
    step.set_context(contexts[0])
    replay = captured(step.run, device)
    for context in contexts:
        step.set_context(context)
        distinct = distinct_experts(step)
        ms = median_ms(replay, device, options.repeats)
        work = step_work(target.config, Step(rows, requests, context, distinct))
        rates = machine.bandwidth_tbs, machine.matmul_tflops
        yield Measurement(
            options.shape,
            options.rank_of,
            target.config.num_layers,
            rows,
            context,
            requests,
            ms,
            floor_ms(work, *rates),
            sum(distinct) / max(1, len(distinct)),
            options.routing,
            str(target.embedding.dtype).removeprefix("torch."),
            options.repeats,
            graph=device.type == "cuda",
            split=time_by_kernel(replay, device) if options.split else {},
            floor_split=floor_by_operator(work, *rates) if options.split else {},
        )


def distinct_experts(step: Verification) -> list[float]:
    """How many different experts each layer's rows choose in this step, counted in an eager run."""
    with _recorded_choices() as chosen:
        step.run()
    config = step.target.config
    layers = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    assert len(chosen) == layers, f"{len(chosen)} choices of experts seen in {layers} layers"
    return [float(len(set(experts.flatten().tolist()))) for experts in chosen]


@contextlib.contextmanager
def _recorded_choices() -> Iterator[list[Tensor]]:
    """The experts [R, k] that the routers of one forward choose, layer by layer.

    The model has no business handing them out, so its router is watched from here.
    """
    found: list[Tensor] = []
    names = [name for name in ("route", "route_rows") if hasattr(moe, name)]
    before = {name: getattr(moe, name) for name in names}

    def watched(operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result = operator(*args, **options)
            found.append(result[0])
            return result

        return call

    try:
        for name, operator in before.items():
            setattr(moe, name, watched(operator))
        yield found
    finally:
        for name, operator in before.items():
            setattr(moe, name, operator)
