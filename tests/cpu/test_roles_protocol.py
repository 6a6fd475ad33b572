"""The groups of warps of kernels/mla_attention/hopper.py, run in random orders on the CPU.

Their own source runs (tests/warps.py): whatever the order, every block's maximum, mass and sums are
those of its tiles, in order; nothing is read before it is there or overwritten while it is read;
and nobody waits for ever. Each wait, barrier and fence of NEEDED is left out once, and that shows.
Not among them are the value groups' waits on `full`: their tile has been scored, so all of it is
there. They make the copies' writes visible to these warps, of which the machine knows nothing.
"""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton's wheels are for Linux")
import warps
from warps import Barrier, Buffer, Descriptor, Fault, Int, Machine, Pointer, Value, View, define

os.environ.setdefault("TRITON_INTERPRET", "1")

from kdtree_engine.kernels.mla_attention import hopper, kernel
from kdtree_engine.kernels.mla_attention.blocks import zones

ZONES = {
    "as the engine has them": zones(),
    "small": zones(((256, 128), (1024, 256), (1 << 30, 512))),
    "128": zones(((1 << 30, 128),)),
    "1024": zones(((1 << 30, 1024),)),
    "one tile": zones(((1 << 30, 64),)),
}
PARTS = ("tile_after", "copy", "score_tile", "score_part", "value_part")
NUMBERS = ("TILE", "KV", "ROPE", "PIECE", "PIECES", "ONES", "STAGES", "QUERY_BYTES", "LOWEST")
COLUMNS = 1 << 20  # rows x heads of a step: large, so that an offset tells its block
COLUMN = 7


def sources(without: str | None = None, times: int = 1) -> list[str]:
    """Of the parts; `without` a line, the `times`-th that reads so."""
    found = [warps.source_of(getattr(hopper, name)) for name in PARTS]
    if without is None:
        return found
    lines = "\f".join(found).split("\n")
    at = [i for i, line in enumerate(lines) if line.split("  #")[0].strip() == without]
    place = at[times - 1]
    indent = len(lines[place]) - len(lines[place].lstrip())
    lines[place] = " " * indent + "pass"
    return "\n".join(lines).split("\f")


def reckoning() -> Any:
    """kernel.py's own arithmetic of blocks."""
    names = {"tl": warps.Language, "TILE": hopper.TILE.value}
    functions = ("block_of", "first_key", "block_at")
    return define([warps.source_of(getattr(kernel, name)) for name in functions], names)


def weigh(s: Value, m: Value) -> tuple[Value, Value, Value]:
    """(weights, factor, maximum): the recurrence as hopper.py writes it."""
    gl, scale = warps.Language, Value("scale")
    top = gl.maximum(m, gl.max(s, 1) * scale)
    factor = gl.full(None, 0.0) + scale
    weight = gl.exp2(gl.fma(s, factor, -top + gl.zeros()))
    return weight, gl.exp2(m - top), top


def expected(pages: list[int], first: int, final: int) -> tuple[int, int, list[int]]:
    """Maximum, mass and the four pieces of a block, tile after tile."""
    m, n = Value("full", hopper.LOWEST.value), Value("zeros")
    sums = [Value("zeros")] * 4

    def columns(name: str, row: int, start: int, count: int) -> tuple[Any, ...]:
        return tuple((name, row, start + 64 * i) for i in range(count))

    for tile in range(first, final):
        row = pages[tile] * 64
        s: Any = None
        for piece in range(4):
            asked = columns("queries", COLUMN, piece * 128, 2)
            keys = columns("keys", row, piece * 128, 2)
            s = Value("product", s.name if s else None, asked, keys)
        s = Value(
            "product", s.name, columns("queries", COLUMN, 512, 1), columns("keys", row, 512, 1)
        )
        weight, factor, m = weigh(s, m)
        kept = n * factor
        n = Value("product", kept.name, weight.name, ("ones",))
        for piece in range(4):
            old = (sums[piece] * Value("is", factor.name)).name if tile > first else None
            sums[piece] = Value("product", old, weight.name, columns("keys", row, piece * 128, 2))
    return m.name, Value("max", n.name, 1).name, [one.name for one in sums]


def wanted(ranges: dict[int, tuple[int, int]], pages: list[int]) -> dict[tuple[str, int], int]:
    """What must stand where, by blocks' tiles [first, final)."""
    found = {}
    for block, (first, final) in ranges.items():
        m, n, sums = expected(pages, first, final)
        at = block * COLUMNS + COLUMN
        found["high", at], found["mass", at] = m, n
        for piece in range(4):
            found["values", at * 512 + piece * 128] = sums[piece]
    return found


def stored(machine: Machine) -> dict[tuple[str, int], int]:
    """What the four warps of a group have stored, all alike."""
    found = {}
    for place, stores in machine.stored.items():
        assert len(stores) == 4
        [found[place]] = {name for _, name in stores}
    return found


def barriers(name: str) -> Any:
    made = [Barrier(f"{name} {stage}") for stage in range(2)]
    return type("Barriers", (), {"index": lambda self, i: made[i]})()


def memory(name: str, count: int, messages: int) -> View:
    return View([Buffer(f"{name} {i}", [None] * messages) for i in range(count)])


def check(
    table: Any, tiles: int, chunks: int, chunk: int, seed: int, parts: list[str] | None = None
) -> None:
    """One program's part of the blocks, in a random order."""
    pages = random.Random(seed).sample(range(10_000), tiles)
    machine = Machine(seed, pages)
    names = machine.names() | {name: getattr(hopper, name).value for name in NUMBERS}
    names |= dict.fromkeys(("SCORES", "MASS", "VALUES", "WEIGHTS"))
    names["pause"] = lambda *_: None
    reckon = reckoning()
    names["block_at"] = reckon["block_at"]
    part = define(parts or sources(), names)
    length, chunk_, chunks_ = Int(tiles * 64), Int(chunk), Int(chunks)
    blocks = reckon["block_of"](length - 1, table) + 1 if tiles else Int(0)
    turns = Int(-(-blocks // chunks))
    ranges = {}
    for turn in range(turns):
        block, first, final = reckon["block_at"](turn, chunk_, chunks_, blocks, length, table)
        if final > first:
            ranges[int(block)] = (int(first), int(final))
    steps = Int(sum(final - first for first, final in ranges.values()))

    latent, rope, shrinks = memory("latent", 8, 2), memory("rope", 2, 1), memory("shrinks", 2, 4)
    q_latent, q_rope, ones = memory("q", 1, 8), memory("q rope", 1, 1), memory("ones", 1, 1)
    ones.buffer.holds = ["ones"]
    for buffer in shrinks.buffers:
        buffer.stored = True
    full = tuple(barriers(f"full {i}") for i in range(5))
    ready, done, q_full = barriers("ready"), barriers("done"), barriers("q full")
    keys, rope_rows = Descriptor("keys", 128), Descriptor("keys", 64)
    queries, query_rows = Descriptor("queries", 512), Descriptor("queries", 64)
    columns = Int(COLUMN), Int(COLUMNS), Int(COLUMN + 1)
    walk = *columns, chunk_, chunks_, blocks, length, turns, steps

    def score() -> None:
        part["score_part"](
            queries, query_rows, latent, rope, shrinks, q_latent, q_rope, ones, full, ready,
            q_full, Pointer("high"), Pointer("mass"), Value("scale"), *walk, table, False,
        )  # fmt: skip

    def value(half: int) -> None:
        part["value_part"](
            keys, rope_rows, latent, rope, shrinks, full, ready, done, Pointer("values"),
            Pointer("table"), *walk, half, table, False,
        )  # fmt: skip

    machine.group("score", score)
    machine.group("left", lambda: value(0))
    machine.group("right", lambda: value(1))
    machine.run()
    assert stored(machine) == wanted(ranges, pages)


def any_case(draw: random.Random) -> tuple[Any, int, int, int, int]:
    table = ZONES[draw.choice(list(ZONES))]
    tiles = draw.choice((*range(9), draw.randrange(60), draw.randrange(140)))
    chunks = draw.choice((1, 2, 3, 4, 8, 16, 40))
    return table, tiles, max(chunks, tiles // 30), draw.randrange(chunks), draw.randrange(1 << 30)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_gives_every_block(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        check(*any_case(draw))


@pytest.mark.parametrize("name", list(ZONES))
def test_few_tiles_in_all_their_chunks(name: str) -> None:
    for tiles, chunks in itertools.product(range(10), (1, 2, 3)):
        for chunk in range(chunks):
            check(ZONES[name], tiles, chunks, chunk, 31 * tiles + chunk)


NEEDED = [
    ("gl.thread_barrier()", 1),  # score: all warps have read the rope part
    ("gl.thread_barrier()", 2),  # score: all weights are there
    ("gl.thread_barrier()", 3),  # value: the first piece is read by all
    ("gl.thread_barrier()", 4),  # value: the second one
    ("gl.thread_barrier()", 5),  # value: all have waited for `done`
    ("fence_async_shared()", 1),
    ("mbarrier.wait(full[piece].index(stage), phase)", 1),
    ("mbarrier.wait(full[PIECES].index(stage), phase)", 1),
    ("mbarrier.wait(queried, 0)", 1),
    ("mbarrier.expect(queried, QUERY_BYTES)", 1),
    ("mbarrier.expect(full, keys.block_type.nbytes)", 1),
    ("mbarrier.wait(ready.index(stage), phase)", 1),
    ("mbarrier.wait(done.index(stage), phase)", 1),
    ("mbarrier.arrive(ready.index(stage))", 1),
    ("mbarrier.arrive(done.index(stage))", 1),
    ("a = warpgroup_mma_wait(1, [a])", 1),
    ("b = warpgroup_mma_wait(0, [b])", 1),
]


@pytest.mark.parametrize(("line", "times"), NEEDED)
def test_what_is_left_out_shows(line: str, times: int) -> None:
    parts, draw = sources(line, times), random.Random(5)
    with pytest.raises((Fault, AssertionError, ValueError)):
        for _ in range(300):
            check(*any_case(draw), parts)
