"""What `kdtree bench step` says: one JSON line a measurement, and a table for the reader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Machine:
    """What a reader needs to judge a number, and the two rates that its floor rests on.

    bandwidth_tbs: bytes read and written by an elementwise copy. matmul_tflops: a large product.
    """

    gpu: str
    commit: str | None
    torch: str
    triton: str | None
    bandwidth_tbs: float
    matmul_tflops: float


@dataclass(frozen=True)
class Measurement:
    """One step: `rows` rows of all requests together over `context` cached tokens each.

    ms: median of the repeats. distinct_experts: mean over the layers with experts. split: time by
    kernel and grid, operators: by operator, floor_split: floor by operator; all ms a step.
    """

    shape: str
    rank_of: int
    layers: int
    rows: int
    context: int
    requests: int
    ms: float
    floor_ms: float
    distinct_experts: float
    routing: str
    dtype: str
    repeats: int
    graph: bool
    all_reduce: bool = False  # one rank alone has nobody to add to
    drafter: bool = False
    gate: bool = True  # without it nothing is measured
    split: dict[str, float] = field(default_factory=dict)
    operators: dict[str, float] = field(default_factory=dict)
    floor_split: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Price:
    """One step under the contract and free of it, in turns. choices: what the free one does."""

    step: Measurement
    ms_contract: float
    ms_free: float
    choices: dict[str, str]

    @property
    def price(self) -> float:
        """What the contract adds, as a fraction of the free step."""
        return self.ms_contract / self.ms_free - 1.0


_OF_THE_STEP = (
    *("shape", "rank_of", "layers", "rows", "context", "requests", "distinct_experts", "routing"),
    *("dtype", "repeats", "graph", "all_reduce", "drafter", "gate"),
)


def price_line(found: Price, machine: Machine) -> str:
    """One line, without a newline."""
    row = {"bench": "price", **{name: getattr(found.step, name) for name in _OF_THE_STEP}}
    row |= {"ms_contract": found.ms_contract, "ms_free": found.ms_free, "price": found.price}
    return _line({**row, "choices": found.choices, **asdict(machine)})


def price_row(found: Price) -> str:
    """Below the step's line."""
    chosen = ", ".join(f"{name} {value}" for name, value in found.choices.items())
    return (
        f"        contract {found.ms_contract:.3f} ms, free {found.ms_free:.3f} ms, "
        f"price {found.price:.1%} (free: {chosen or 'the same choices'})"
    )


def json_line(found: Measurement, machine: Machine) -> str:
    """One line, without a newline."""
    row = {"bench": "step", **asdict(found), "ratio": found.floor_ms / found.ms, **asdict(machine)}
    for empty in ("split", "operators", "floor_split"):
        if not row[empty]:
            del row[empty]
    return _line(row)


def _line(row: dict[str, Any]) -> str:
    rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}
    return json.dumps(rounded)


HEADER = f"{'rows':>6}{'context':>9}{'ms':>10}{'floor ms':>10}{'ratio':>8}{'experts':>9}"


def table_row(found: Measurement) -> str:
    """A line under HEADER."""
    return (
        f"{found.rows:>6}{found.context:>9}{found.ms:>10.3f}{found.floor_ms:>10.3f}"
        f"{found.floor_ms / found.ms:>8.2f}{found.distinct_experts:>9.1f}"
    )


def split_rows(found: Measurement, most: int = 16) -> list[str]:
    """Operators, then the largest kernels by grid, then the floor's operators; ms a step.

    Kernels that start before the one before them has ended are counted in full: the sum may exceed
    the step's time.
    """
    lines = _times("operator", found.operators, len(found.operators))
    lines += _times("kernel", found.split, most)
    return lines + _times("floor of operator", found.floor_split, len(found.floor_split))


def _times(title: str, spent: Mapping[str, float], most: int) -> list[str]:
    """The `most` largest, and the others together."""
    lines = [f"        {title:<44}{'ms':>9}{'share':>8}"]
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    whole = sum(spent.values()) or 1.0
    for name, ms in ordered[:most]:
        lines.append(f"        {name[:43]:<44}{ms:>9.3f}{ms / whole:>8.1%}")
    if len(ordered) > most:
        rest = sum(ms for _, ms in ordered[most:])
        lines.append(f"        {f'{len(ordered) - most} others':<44}{rest:>9.3f}")
    return lines


def heading(
    shape: str, rank_of: int, layers: int, requests: int, drafter: bool, machine: Machine
) -> list[str]:
    """What was measured, before the table."""
    whole = "the whole model" if rank_of == 1 else f"the share of one of {rank_of} ranks"
    return [
        f"{shape}, {layers} layers, {whole}, {requests} request(s), on {machine.gpu}",
        f"copy {machine.bandwidth_tbs:.2f} TB/s, product {machine.matmul_tflops:.0f} TFLOP/s; "
        + ("all-reduces are left out" if drafter else "all-reduces and the drafter are left out"),
    ]


def numbers(text: str) -> list[int] | None:
    """Whole numbers separated by commas, 4K being 4096; None if it is anything else."""
    found: list[int] = []
    for word in text.split(","):
        digits = word.strip().lower()
        unit = 1024 if digits.endswith("k") else 1
        digits = digits.removesuffix("k")
        if not digits.isascii() or not digits.isdigit() or len(digits) > 9:
            return None
        found.append(int(digits) * unit)
    return found


def rows_per_request(rows: Sequence[int], requests: int, most: int) -> list[int]:
    """The counts of `rows` that `requests` requests can share evenly, at most `most` each."""
    return [count for count in rows if count % requests == 0 and 1 <= count // requests <= most]
