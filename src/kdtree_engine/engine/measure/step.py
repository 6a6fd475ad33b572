"""`kdtree bench step`: one rank's share of a model, one decode step, rows by context."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from kdtree_engine.cache import CacheLayout, CachePool, pages_for
from kdtree_engine.config import MAX_ROWS_PER_REQUEST, ModelConfig
from kdtree_engine.drafter.dflash_model import DFlashModel
from kdtree_engine.engine.build import resolve_device
from kdtree_engine.engine.measure import gate
from kdtree_engine.engine.measure.decoding import (
    Decoding,
    brooms,
    decoding,
    distinct_experts,
    random_pool,
)
from kdtree_engine.engine.measure.floor import (
    Step,
    drafter_work,
    floor_by_operator,
    floor_ms,
    step_work,
)
from kdtree_engine.engine.measure.free import Matrices
from kdtree_engine.engine.measure.price import Pricer
from kdtree_engine.engine.measure.products import by_operator, products
from kdtree_engine.engine.measure.shapes import drafter_shape, shape, share
from kdtree_engine.engine.measure.table import (
    HEADER,
    Machine,
    Measurement,
    heading,
    json_line,
    price_line,
    price_row,
    rows_per_request,
    split_rows,
    table_row,
)
from kdtree_engine.engine.measure.timing import (
    Timed,
    check_machine,
    measure_machine,
    medians_ms,
    time_by_kernel,
)
from kdtree_engine.engine.measure.warm import warm
from kdtree_engine.engine.measure.weights import APART, random_drafter, random_target
from kdtree_engine.engine.memory import check_fits, free_bytes, page_bytes
from kdtree_engine.errors import OptionError
from kdtree_engine.model import Kimi

Say = Callable[[str], None]

LARGE = "kimi-k2.6"  # too large a shape for a CPU
_SPARE_BYTES = 8 << 30  # for activations, graphs and the allocator
_FREE_BYTES = 12 << 30  # for weights as cuBLAS reads them


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
    drafter: bool = False
    free: bool = False
    repeats: int = 20
    temperature: float = 0.0
    seed: int = 0


def run(options: Options, say: Say, write: Say) -> list[Measurement]:
    """Check, build, measure. `say` gets lines for the reader, `write` JSON lines."""
    config, counts, contexts = plan(options)
    device = resolve_device("auto")
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    if not cuda and options.shape == LARGE:
        raise OptionError(f"--shape {LARGE} needs a CUDA GPU, and torch sees none: try tiny")
    check_fits(config, dtype, device)
    with torch.inference_mode():
        machine = measure_machine(device)
        check_machine(machine)
        if cuda:
            warm(options, counts, say)
        shallow = replace(config, num_layers=min(gate.LAYERS, config.num_layers))
        gate.check_rows(random_target(shallow, dtype, device, options.routing, options.seed), dtype)
        say(f"gate passed: {gate.ROWS} rows of {shallow.num_layers} layers, bits of plain decoding")
        target = random_target(
            config, dtype, device, options.routing, options.seed, embedding=APART
        )
        drafter = None
        if options.drafter:
            drafter = random_drafter(drafter_shape(options.shape, config), dtype, device)
        contexts, pool = _pool(target, drafter, options, contexts, dtype, say)
        bench = _Bench(options, target, drafter, pool, machine, say, write)
        for line in heading(
            options.shape,
            options.rank_of,
            config.num_layers,
            options.requests,
            options.drafter,
            machine,
        ):
            say(line)
        say(HEADER)
        found = [one for rows in counts for one in bench.measure(rows, contexts)]
        return list(bench.split(found)) if options.split else found


def compile_kernels(options: Options) -> None:
    """Do every step of `options` once, without measuring or checking; a drafter has one layer."""
    config, counts, contexts = plan(options)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    with torch.inference_mode():
        target = random_target(config, dtype, device, options.routing, options.seed)
        drafter = None
        if options.drafter:
            shape = drafter_shape(options.shape, config)
            shape = replace(shape, num_layers=1, masks=shape.masks[:1])
            drafter = random_drafter(shape, dtype, device)
        _, pool = _pool(target, drafter, options, contexts, dtype, _nobody)
        for rows in counts:
            step = _decoding(options, target, drafter, pool, rows)
            step.stand(0)
            step.launch()


def _nobody(line: str) -> None:
    """Nobody listens."""


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


def _pool(
    target: Kimi,
    drafter: DFlashModel | None,
    options: Options,
    contexts: Sequence[int],
    dtype: torch.dtype,
    say: Say,
) -> tuple[list[int], CachePool]:
    """The contexts that memory allows, and a cache for the longest of them.

    It has as many pages as a request of all positions, if they fit: a request's table is then as
    wide as `generate` has it, and kernels allot their results by its width.
    """
    if target.embedding.is_cuda:
        gc.collect()
        torch.cuda.empty_cache()
    shape = None if drafter is None else drafter.config
    most, free = None, free_bytes(target.device)
    if free is not None:
        if target.embedding.is_cuda:
            free -= _SPARE_BYTES + (_FREE_BYTES if options.free else 0)
        most = max(0, free) // page_bytes(target.config, shape, dtype)
    fitting = [
        context
        for context in contexts
        if most is None or options.requests * _pages(context) <= most
    ]
    if len(fitting) < len(contexts):
        say(f"left out for lack of memory: contexts {sorted({*contexts} - {*fitting})}")
    if not fitting:
        raise OptionError("no context of --contexts fits into the memory that is free")
    whole = pages_for(target.config.max_positions)
    pages = options.requests * _pages(max(fitting))
    pages = max(pages, whole if most is None else min(whole, most))
    return fitting, random_pool(target, CacheLayout(pages, options.requests), dtype, shape)


def _pages(context: int) -> int:
    """Pages of one request: its context and what a few steps may commit."""
    return pages_for(context + MAX_ROWS_PER_REQUEST)


def _decoding(
    options: Options, target: Kimi, drafter: DFlashModel | None, pool: CachePool, rows: int
) -> Decoding:
    """A new engine whose requests share `rows` rows."""
    each = rows // options.requests
    draft = brooms(options.requests, each, target.config.vocab_size, options.seed)
    return decoding(target, pool, each, *draft, options.temperature, drafter)


@dataclass(frozen=True, eq=False)
class _Bench:
    """Everything that is built once."""

    options: Options
    target: Kimi
    drafter: DFlashModel | None
    pool: CachePool
    machine: Machine
    say: Say
    write: Say
    matrices: Matrices = field(default_factory=Matrices)

    def measure(self, rows: int, contexts: Sequence[int]) -> Iterator[Measurement]:
        """Steps of `rows` rows, one graph for all contexts, as the engine has it."""
        step = self.decoding(rows)
        step.stand(contexts[0])
        timed = step.reset, step.captured()
        pricer = Pricer(lambda: self.decoding(rows), self.matrices) if self.options.free else None
        for context in contexts:
            found = self.at(step, timed, context)
            self.say(table_row(found))
            if not self.options.split:
                self.write(json_line(found, self.machine))
            if pricer is not None:
                price = pricer.price(timed, found)
                self.say(price_row(price))
                self.write(price_line(price, self.machine))
            yield found
        del step, timed, pricer
        gc.collect()  # an engine and its runner know each other, and hold a graph's memory

    def split(self, found: Sequence[Measurement]) -> Iterator[Measurement]:
        """The measurements with their time by kernel, when all have been timed: whatever runs
        after the profiler has once been used is slower (a step of an H200 by some 0.3 ms).
        """
        for rows, ones in itertools.groupby(found, lambda one: one.rows):
            step = self.decoding(rows)
            step.stand(0)
            replay = step.captured()
            for one in ones:
                step.stand(one.context)
                spent = time_by_kernel(replay, self.target.device)
                step.reset()
                whole = replace(one, split=spent, operators=by_operator(spent, products(step)))
                self.say(table_row(whole))
                for line in split_rows(whole):
                    self.say(line)
                self.write(json_line(whole, self.machine))
                yield whole
            del step, replay
            gc.collect()

    def decoding(self, rows: int) -> Decoding:
        """A new engine whose requests share `rows` rows."""
        return _decoding(self.options, self.target, self.drafter, self.pool, rows)

    def at(self, step: Decoding, timed: Timed, context: int) -> Measurement:
        """One row of the table."""
        options, device, config = self.options, self.target.device, self.target.config
        step.stand(context)
        distinct = distinct_experts(step)
        [ms] = medians_ms([timed], device, options.repeats)
        rows = len(step.requests) * step.rows
        each = Step(rows, options.requests, context, distinct)
        work = step_work(config, each)
        if self.drafter is not None:
            work += drafter_work(self.drafter.config, config, each)
        rates = self.machine.bandwidth_tbs, self.machine.matmul_tflops
        step.reset()
        return Measurement(
            options.shape,
            options.rank_of,
            config.num_layers,
            rows,
            context,
            options.requests,
            ms,
            floor_ms(work, *rates),
            sum(distinct) / max(1, len(distinct)),
            options.routing,
            str(self.target.embedding.dtype).removeprefix("torch."),
            options.repeats,
            graph=step.engine.runner.captures,
            drafter=self.drafter is not None,
            floor_split=floor_by_operator(work, *rates) if options.split else {},
        )
