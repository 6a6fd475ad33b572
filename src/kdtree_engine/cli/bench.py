"""`kdtree bench step`: what a decode step takes on this machine, beside the least it could take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kdtree_engine.errors import OptionError

bench = App(name="bench", help="Measure this machine.", help_format="plaintext")


def _flag(text: str) -> Parameter:
    return Parameter(help=text, negative=(), show_default=False)


@bench.command
def step(
    *,
    shape: Annotated[str, Parameter(help="kimi-k2.6, or tiny for a CPU.", metavar="NAME")],
    rank_of: Annotated[
        int, Parameter(help="Build the share of one of N tensor-parallel ranks.", metavar="N")
    ] = 8,
    layers: Annotated[
        int | None, Parameter(help="The first N layers only.", metavar="N", show_default=False)
    ] = None,
    requests: Annotated[int, Parameter(help="Requests that share the rows.", metavar="N")] = 1,
    routing: Annotated[
        str, Parameter(help="How experts are loaded: uniform or zipf.", metavar="NAME")
    ] = "uniform",
    rows: Annotated[
        str, Parameter(help="Rows of a step, of all requests together.", metavar="N,N,...")
    ] = "1,2,4,8,16,32,64",
    contexts: Annotated[
        str, Parameter(help="Cached tokens of each request; 4K is 4096.", metavar="N,N,...")
    ] = "0,4K,32K,128K",
    temperature: Annotated[float, Parameter(help="0 is greedy.", metavar="T")] = 0.0,
    repeats: Annotated[int, Parameter(help="Steps timed; the median counts.", metavar="N")] = 20,
    json: Annotated[
        str | None,
        Parameter(help="Append one JSON line a measurement.", metavar="FILE", show_default=False),
    ] = None,
    split: Annotated[bool, _flag("Also the time by operator and kernel.")] = False,
    drafter: Annotated[bool, _flag("A DFlash drafter drafts inside the step.")] = False,
    free: Annotated[bool, _flag("Also the step free of the contract, and its price.")] = False,
) -> None:
    """Time the decode step of a model made of random weights, without files.

    It is the very step that `generate` does: trees from a given draft (or from a drafter), verify,
    sample, walk, commit. The floor is the time of what must be read and computed, at this machine's
    own rates.
    """
    from kdtree_engine.engine.measure.step import Options, run

    options = Options(
        shape,
        rank_of,
        layers,
        requests,
        routing,
        _numbers("--rows", rows),
        _numbers("--contexts", contexts),
        split=split,
        repeats=repeats,
        temperature=temperature,
        drafter=drafter,
        free=free,
    )
    if json is None:
        run(options, _say, _drop)
        return
    with Path(json).open("a", encoding="utf-8") as out:
        run(options, _say, lambda line: print(line, file=out, flush=True))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from kdtree_engine.engine.measure.table import numbers

    found = numbers(text)
    if found is None:
        raise OptionError(f"{option} is {text!r:.80}: expected numbers such as 1,2,4K")
    return tuple(found)


def _say(line: str) -> None:
    print(line, flush=True)


def _drop(line: str) -> None:
    """Nobody asked for JSON."""
