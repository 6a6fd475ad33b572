"""What `kdtree bench step` says: one JSON line a measurement, and a table for the reader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


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
    kernel, floor_split: floor by operator, both ms a step.
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
    split: dict[str, float] = field(default_factory=dict)
    floor_split: dict[str, float] = field(default_factory=dict)


def json_line(found: Measurement, machine: Machine) -> str:
    """One line, without a newline."""
    row = {"bench": "step", **asdict(found), "ratio": found.floor_ms / found.ms, **asdict(machine)}
    for empty in ("split", "floor_split"):
        if not row[empty]:
            del row[empty]
    rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}
    return json.dumps(rounded)


HEADER = f"{'rows':>6}{'context':>9}{'ms':>10}{'floor ms':>10}{'ratio':>8}{'experts':>9}"


def table_row(found: Measurement) -> str:
    """A line under HEADER."""
    return (
        f"{found.rows:>6}{found.context:>9}{found.ms:>10.3f}{found.floor_ms:>10.3f}"
        f"{found.floor_ms / found.ms:>8.2f}{found.distinct_experts:>9.1f}"
    )


def split_rows(found: Measurement, most: int = 24) -> list[str]:
    """The largest kernels, then the floor's operators; ms a step.

    Kernels that start before the one before them has ended are counted in full: the sum may exceed
    the step's time.
    """
    lines = [f"        {'kernel':<44}{'ms':>9}{'share':>8}"]
    ordered = sorted(found.split.items(), key=lambda item: -item[1])
    whole = sum(found.split.values()) or 1.0
    for name, ms in ordered[:most]:
        lines.append(f"        {name[:43]:<44}{ms:>9.3f}{ms / whole:>8.1%}")
    if len(ordered) > most:
        rest = sum(ms for _, ms in ordered[most:])
        lines.append(f"        {f'{len(ordered) - most} others':<44}{rest:>9.3f}")
    lines.append(f"        {'floor of operator':<44}{'ms':>9}")
    for name, ms in sorted(found.floor_split.items(), key=lambda item: -item[1]):
        lines.append(f"        {name:<44}{ms:>9.3f}")
    return lines


def heading(shape: str, rank_of: int, layers: int, requests: int, machine: Machine) -> list[str]:
    """What was measured, before the table."""
    whole = "the whole model" if rank_of == 1 else f"the share of one of {rank_of} ranks"
    return [
        f"{shape}, {layers} layers, {whole}, {requests} request(s), on {machine.gpu}",
        f"copy {machine.bandwidth_tbs:.2f} TB/s, product {machine.matmul_tflops:.0f} TFLOP/s; "
        "all-reduces and the drafter are left out",
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
