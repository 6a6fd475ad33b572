"""Compile kernels for GPUs that are not here, from the very launches that operators make.

Run as a program, without Triton's interpreter: launches are recorded instead of run, on tensors
without memory, and each different one is compiled for sm_90 and sm_120.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
OPTIONS = (
    "num_warps",
    "num_stages",
    "num_ctas",
    "launch_pdl",
    "maxnreg",
    "enable_fp_fusion",
)


@dataclass(frozen=True)
class Launch:
    """One kernel with the types, constants and options of a launch."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]  # pointers, and whole numbers that 16 divides

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)

    def compile(self, capability: int) -> Any:
        """The compiled kernel, with `metadata.shared`, for this compute capability."""
        constants = {(self.kernel.arg_names.index(name),): v for name, v in self.constants}
        attributes = {
            (self.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in self.aligned
        }
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = kind(self.kernel, dict(self.signature), constants, attributes)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options=dict(self.options))


def kind_of(value: Any) -> str:
    """Triton's name of an argument's type."""
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def describe(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """A launch's types; `args` and `kwargs` as given to `kernel[grid]`."""
    options = tuple((name, kwargs.pop(name)) for name in OPTIONS if name in kwargs)
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    fixed |= {name for name, value in values.items() if value is None}
    signature = tuple(
        (name, "constexpr" if name in fixed else kind_of(values[name])) for name in kernel.arg_names
    )
    constants = tuple((name, values[name]) for name in kernel.arg_names if name in fixed)
    aligned = tuple(
        name
        for name, kind in signature
        if kind.startswith("*") or (kind in ("i32", "i64") and values[name] % 16 == 0)
    )
    return Launch(kernel, signature, constants, options, aligned)


def record(work: Callable[[], object]) -> list[Launch]:
    """The different launches that `work` makes; nothing runs."""
    found: dict[tuple[Any, ...], Launch] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = describe(self, args, kwargs)
        found[(self, launch.signature, launch.constants, launch.options, launch.aligned)] = launch

    original = JITFunction.run
    JITFunction.run = run
    try:
        work()
    finally:
        JITFunction.run = original
    return list(found.values())


def registers(compiled: Any) -> str:
    """ptxas's count of registers and spilled bytes, from the compiled binary."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    return f"{found[1]} registers, {found[2]} bytes of stack" if found else text.stdout
