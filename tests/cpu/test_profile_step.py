"""benches/profile_step.py reads what Nsight Compute prints."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "benches" / "profile_step.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("profile_step", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["profile_step"] = module
    spec.loader.exec_module(module)
    return module


def test_kernels_of_one_grid_are_averaged(bench: ModuleType) -> None:
    names = ["Kernel Name", "Grid Size", *bench.METRICS]
    units = ["", "", "ns", "%", "%", "%", "register/thread"]
    rows = [
        ["small(int)", "(1, 1, 1)", "2,000", "1", "2", "3", "40"],
        ["large(int)", "(33, 4, 1)", "9,500", "70", "20", "5", "63"],
        ["large(int)", "(33, 4, 1)", "10500", "80", "20", "5", "63"],
    ]
    table = [names, units, *rows]
    text = "==PROF== Connected\n" + "\n".join(
        ",".join(f'"{cell}"' for cell in line) for line in table
    )
    first, second = bench.read(text)
    assert (first.kernel, first.grid, first.calls) == ("large", "(33,4,1)", 2)
    assert first.values["us"] == pytest.approx(10.0) and first.values["dram"] == 75.0
    assert second.values["us"] == pytest.approx(2.0)
    assert "large" in first.text() and "10.00" in first.text()
