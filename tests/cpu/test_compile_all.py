"""Every kernel compiles for GPUs that are not here, and fits their shared memory. The compiler runs
in a process of its own, since this one may have Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def compiler() -> str | None:
    """Triton's own ptxas; None where this machine has none."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    try:
        path = triton.knobs.nvidia.ptxas.path
    except RuntimeError:  # what it says where it finds none
        return None
    return path if Path(path).exists() else None


@pytest.mark.parametrize("capability", [90, 120])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    """An empty cache: otherwise a kernel that no longer compiles could be found there."""
    if compiler() is None:
        pytest.skip("triton has no ptxas here")
    command = [sys.executable, str(TESTS / "compile_all.py"), str(capability)]
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **settings}, cwd=TESTS
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = done.stdout.splitlines()
    assert all(f"sm_{capability} " in line and "bytes of shared memory" in line for line in lines)
    assert len({line.split(":")[0] for line in lines}) >= 25, "different kernels"
