"""benches/kernels.py: one line for whatever goes wrong, the budget, the best of each group."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kdtree_engine.engine.measure.table import Machine

BENCHES = Path(__file__).resolve().parents[2] / "benches"
MACHINE = Machine("NVIDIA H200", "abc", "2.13", "3.6.0", 4.0, 800.0)
NEVER = float("inf")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHES))
    try:
        yield importlib.import_module("kernels")
    finally:
        sys.path[:] = [entry for entry in sys.path if entry != str(BENCHES)]
        for name in [name for name in sys.modules if name == "kernels" or name.startswith("ops")]:
            sys.modules.pop(name)


def variants(kernels: ModuleType) -> Iterator[Any]:
    def broken() -> str | None:
        raise ZeroDivisionError("a\nb")

    right = {"run": lambda layer: None, "layers": 2, "bytes": 4e6, "flops": 8e6}
    yield kernels.Variant("a R=1 (64, 2)", check=lambda: None, **right)
    yield kernels.Variant("a R=1 chosen (32, 2)", check=lambda: None, **right)
    yield kernels.Variant("a R=1 (16, 2)", check=lambda: "error 1", **right)
    yield kernels.Variant("b | x", check=broken, **right)
    yield kernels.Variant("b | y", check=lambda: None, **right)
    raise ValueError("no more")


def timer(variant: Any) -> float:
    return {"a R=1 (64, 2)": 4.0, "a R=1 chosen (32, 2)": 2.0, "b | y": 10.0}[variant.name]


def test_what_goes_wrong_takes_a_line_and_stops_nobody(kernels: ModuleType) -> None:
    found = list(kernels.measure_op("op", variants(kernels), MACHINE, re.compile(""), NEVER, timer))
    assert [row.us for row in found] == [4.0, 2.0, None, None, 10.0, None]
    assert [row.wrong for row in found[2:]] == [
        "WRONG: error 1", "ZeroDivisionError: a b", None, "ValueError: no more",
    ]  # fmt: skip
    assert found[0].floor_us == 1.0 and found[1].ratio == 0.5
    assert [row.variant for row in kernels.best_rows(found)] == ["a R=1 chosen (32, 2)", "b | y"]
    assert all("\n" not in row.text() for row in found)
    line = json.loads(kernels.json_line(found[1], MACHINE))
    assert line["bench"] == "kernel" and line["ratio"] == 0.5 and line["group"] == "a R=1"


def test_filter_and_budget(kernels: ModuleType) -> None:
    rows = kernels.measure_op("op", variants(kernels), MACHINE, re.compile("op b.*y"), NEVER, timer)
    assert [row.variant for row in rows] == ["b | y", "(all that follow)"]
    with pytest.raises(kernels.Out, match="budget"):
        list(kernels.measure_op("op", variants(kernels), MACHINE, re.compile(""), 0.0, timer))


def test_every_operator_has_variants(kernels: ModuleType) -> None:
    names = kernels.op_names()
    assert "dflash_attention" in names and "base" not in names
    for name in names:
        assert callable(importlib.import_module(f"ops.{name}").variants), name
    assert kernels.parse([]).ops.split(",") == names


def test_floor_is_the_longer_of_bytes_and_operations(kernels: ModuleType) -> None:
    busy = kernels.Variant("c", lambda layer: None, lambda: None, 1, bytes=4e6, flops=8e9)
    assert kernels.floor_us(busy, MACHINE) == 10.0
