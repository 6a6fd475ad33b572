"""benches/sanitize.py: its load runs, and what a tool reports is read; the tool is a stand-in."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHES = Path(__file__).resolve().parents[2] / "benches"

STAND_IN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift 2; done
"$@"
echo "========= Error: Race reported between Write access at experts_up+0x1f0"
echo "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"
"""


@pytest.fixture(scope="module")
def sanitize() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHES))
    try:
        yield importlib.import_module("sanitize")
    finally:
        sys.path.remove(str(BENCHES))
        for name in ("sanitize", "gate"):
            sys.modules.pop(name, None)


def test_launched_kernels(sanitize: ModuleType) -> None:
    kernels = sanitize.launched_kernels()
    assert {"partials", "combine", "experts_up", "runs_kernel", "paths_kernel"} <= set(kernels)
    assert "begin" not in kernels and len(kernels) > 20


def test_a_run(sanitize: ModuleType, tmp_path: Path) -> None:
    tool, out = tmp_path / "tool", tmp_path / "out.json"
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    command = [sys.executable, str(BENCHES / "sanitize.py"), "--device", "cpu"]
    command += ["--tools", "racecheck", "--sanitizer", str(tool), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads(out.read_text())
    bare, race = found["tools"]
    assert bare["exit_code"] == race["exit_code"] == 0, bare["tail"]
    assert race["errors"] == 2 and race["kernels_named"] == {"experts_up": 1}


def test_reports_are_read(sanitize: ModuleType) -> None:
    good = "========= COMPUTE-SANITIZER\nfine\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitize.found_in(good, ["combine"])["errors"] == 0
    assert sanitize.found_in("========= COMPUTE-SANITIZER\n", [])["errors"] is None
    bad = "========= Invalid __global__ read of size 2 bytes\n=========     at combine+0x10\n"
    found = sanitize.found_in(bad + "========= ERROR SUMMARY: 1 error\n", ["combine", "partials"])
    assert found["errors"] == 1 and found["kernels_named"] == {"combine": 1}
    result = {"exit_code": 0, "kernels_not_seen": [], "errors": None}
    assert not sanitize.clean(result, True)
    result = {"exit_code": 0, "kernels_not_seen": ["combine"], "errors": 0}
    assert sanitize.clean(result, False) and not sanitize.clean(result, True)


def test_hazards_are_counted_by_their_lines(sanitize: ModuleType) -> None:
    hazard = (
        "========= Error: Potential RAW hazard detected at __shared__ 0x36c81 in block (28,0,0) :\n"
        "=========     Write Thread (67,0,0) at role_partials+0xb530 in hopper.py:130\n"
        "=========     Read Thread (192,0,0) at role_partials+0x21d0 in hopper.py:187\n"
    )
    found = sanitize.found_in(hazard * 3, ["role_partials"])["hazards_between"]
    assert found == {"RAW in role_partials: Write in hopper.py:130, Read in hopper.py:187": 3}
    without_lines = hazard.replace(" in hopper.py:130", "").replace(" in hopper.py:187", "")
    found = sanitize.found_in(without_lines, [])["hazards_between"]
    assert found == {"RAW in role_partials: Write, Read": 1}


COMPILE = """
import re, sys
sys.path.insert(0, sys.argv[1])
import handover, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
names = handover.handed.arg_names
for constants in handover.VARIANTS[:1] + handover.VARIANTS[-1:]:
    given = {(names.index(n),): v for n, v in zip(names[1:], constants)}
    types = {"out": "*i32", **{n: "constexpr" for n in names[1:]}}
    source = GluonASTSource(handover.handed, types, given)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found = re.findall(r"stmatrix|ldmatrix|st.shared.v4|ld.shared.v4|try_wait", compiled.asm["ptx"])
    print(compiled.metadata.name, *sorted(found))
"""


def test_the_least_kernels_hand_over_by_plain_stores() -> None:
    """What a matrix store or load touches the tool may not see, and then says nothing of it."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(BENCHES)],
        capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "handed_runs_late_writer_meets_writer ld.shared.v4 st.shared.v4",
        "handed_waits_late_reader_meets_none ld.shared.v4 st.shared.v4 try_wait",
    ], done.stderr


def test_an_unknown_name_is_one_line() -> None:
    for option, name in (("--parts", "wider"), ("--tools", "racechek")):
        command = [sys.executable, str(BENCHES / "sanitize.py"), "--device", "cpu", option, name]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
        assert f"{option} {name}: there is no {name}; known are " in done.stderr
