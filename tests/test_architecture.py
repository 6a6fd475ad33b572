"""The shape of the source: who may import whom, how long things may get, who reads the environment.

The rules are data at the top; each check takes a folder, so that the tests below can also run it
over planted violations and see it fail.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "kdtree_engine"
SOURCE = REPOSITORY / "src" / PACKAGE

# A unit is a module or folder directly under the package. It imports only from the lines above its
# own, and on its own line only from the units to its left.
LAYERS = (
    ("types", "config", "errors", "env", "log"),
    ("kernels",),
    ("parallel", "cache", "checkpoints", "tokenizer", "tree"),
    ("model", "sampling"),
    ("drafter",),
    ("engine",),
    ("training", "server"),
    (PACKAGE,),  # the package's own __init__, which re-exports the API
    ("cli",),
)
RANK = {
    unit: (line, column) for line, units in enumerate(LAYERS) for column, unit in enumerate(units)
}

FUNCTION_LINES, KERNEL_FUNCTION_LINES = 60, 150
FILE_LINES, KERNEL_FILE_LINES = 400, 600
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
OPERATOR_FILES = ("__init__.py", "cases.py", "reference.py")


class Import(NamedTuple):
    line: int
    target: str  # dotted, absolute


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path, package: Path) -> Iterator[Import]:
    """Every import of the package's own modules, lazy and typing-only ones included."""
    inside = path.relative_to(package).with_suffix("").parts
    here = [PACKAGE, *inside]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(node.lineno, name.name)
        elif isinstance(node, ast.ImportFrom):
            # here[:-n] is the package n levels up, for a module and for an __init__ alike.
            base = here[: -node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            if stem == PACKAGE:
                for name in node.names:
                    is_unit = name.name in RANK or (package / name.name).exists()
                    is_unit = is_unit or (package / f"{name.name}.py").exists()
                    yield Import(node.lineno, f"{stem}.{name.name}" if is_unit else stem)
            else:
                yield Import(node.lineno, stem)


def unit_of(dotted: str) -> str | None:
    """The unit that a dotted name lies in; None outside the package."""
    parts = dotted.split(".")
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 else PACKAGE


def check_layers(package: Path) -> list[str]:
    wrong = []
    for path in sources(package):
        relative = path.relative_to(package)
        first = relative.parts[0].removesuffix(".py")
        unit = PACKAGE if first == "__init__" else first
        if unit not in RANK:
            wrong.append(f"{relative}: {unit} is not in the layer table")
            continue
        for found in imports(path, package):
            target = unit_of(found.target)
            if target is None or target == unit:
                continue
            line, column = RANK[unit]
            target_line, target_column = RANK.get(target, (len(LAYERS), 0))
            above = target_line < line
            left = target_line == line and target_column < column
            if not (above or left):
                wrong.append(f"{relative}:{found.line}: {unit} imports {target}")
    return wrong


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is decorated with triton.jit or gluon.jit, bare or with arguments."""
    names = {ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
    return bool(names & {"triton.jit", "gluon.jit"})


def check_lengths(folder: Path) -> list[str]:
    wrong = []
    for path in sources(folder):
        relative = path.relative_to(folder)
        count = len(path.read_text(encoding="utf-8").splitlines())
        limit = KERNEL_FILE_LINES if path.name in ("kernel.py", "hopper.py") else FILE_LINES
        if count > limit:
            wrong.append(f"{relative}: {count} lines, at most {limit}")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                most = KERNEL_FUNCTION_LINES if is_kernel(node) else FUNCTION_LINES
                if length > most:
                    wrong.append(f"{relative}:{node.lineno}: {node.name} has {length} lines")
    return wrong


def check_environment(package: Path) -> list[str]:
    """Uses of os.environ and its kin outside env.py, imported by name or not."""
    wrong = []
    for path in sources(package):
        relative = path.relative_to(package)
        if relative == Path("env.py"):
            continue
        for node in ast.walk(parse(path)):
            used: set[str] = set()
            if isinstance(node, ast.Attribute):
                used = {node.attr}
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                used = {name.name for name in node.names}
            for name in sorted(used & ENVIRONMENT_NAMES):
                wrong.append(f"{relative}:{getattr(node, 'lineno', 0)}: os.{name}")
    return wrong


def check_operators(package: Path) -> list[str]:
    folder = package / "kernels"
    if not folder.is_dir():
        return []
    operators = [path for path in sorted(folder.iterdir()) if path.is_dir() and sources(path)]
    return [
        f"kernels/{operator.name}: no {name}"
        for operator in operators
        for name in OPERATOR_FILES
        if not (operator / name).is_file()
    ]


def check_demo(package: Path) -> list[str]:
    return [str(path.relative_to(package)) for path in sources(package / "demo")]


def test_imports_point_one_way() -> None:
    assert sources(SOURCE), f"no source under {SOURCE}"
    assert check_layers(SOURCE) == []


@pytest.mark.parametrize("folder", ["src", "benches", "recipes"])
def test_functions_and_files_stay_short(folder: str) -> None:
    assert check_lengths(REPOSITORY / folder) == []


def test_only_env_reads_the_environment() -> None:
    assert check_environment(SOURCE) == []


def test_every_operator_has_its_files() -> None:
    assert check_operators(SOURCE) == []


def test_the_packaged_model_is_files_only() -> None:
    assert check_demo(SOURCE) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["generate", "--help"],
        ["make-checkpoint", "--help"],
        ["train-drafter", "--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    script = (
        "import sys, kdtree_engine, kdtree_engine.cli\n"
        f"code = kdtree_engine.cli.run({arguments!r})\n"
        "assert code == 0, code\n"
        "heavy = {'torch', 'numpy', 'tiktoken', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_unknown_names_of_the_package_are_attribute_errors() -> None:
    import kdtree_engine

    assert {"LLM", "SamplingParams"} <= set(dir(kdtree_engine))
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = kdtree_engine.nothing_here


# The checks themselves, on planted violations.


def plant(root: Path, files: dict[str, str]) -> Path:
    package = root / PACKAGE
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kernels/op/kernel.py", "from ...engine import step"),
        ("kernels/op/__init__.py", "from ... import model"),
        ("cache/pool.py", "from ..tree.build import x"),  # same line, to the right
        ("types.py", "from .log import x"),
        ("types.py", "import kdtree_engine.config"),
        ("env.py", "from kdtree_engine import log"),
        ("drafter/base.py", "def f():\n    from ..engine.step import x"),  # lazy
        ("model/mla.py", "if TYPE_CHECKING:\n    from ..drafter import x"),  # typing only
        ("engine/llm.py", "from .. import LLM"),  # through the package's own __init__
        ("engine/llm.py", "from kdtree_engine import LLM"),
        ("engine/llm.py", "import kdtree_engine"),
        ("__init__.py", "from .cli import main"),
        ("training/loop.py", "from ..server.http import x"),
        ("cli/__init__.py", "from ..helpers import x"),  # a unit outside the table
        ("helpers.py", "import math"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, name: str, text: str) -> None:
    assert len(check_layers(plant(tmp_path, {name: text}))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tree/__init__.py", "from ..kernels.tree_build import build\nfrom .mask import x"),
        ("tree/build.py", "from ..cache.pool import x\nfrom . import mask\nfrom .. import types"),
        ("log.py", "from .env import read_environment\nimport logging"),
        ("__init__.py", "from .engine.llm import LLM"),
        ("cli/show_tree.py", "from ..engine import llm\nfrom ..errors import KDTreeError"),
        ("engine/llm.py", "import torch\nfrom kdtree_engine_other import x"),
    ],
)
def test_a_downward_import_is_not(tmp_path: Path, name: str, text: str) -> None:
    assert check_layers(plant(tmp_path, {name: text})) == []


def function(name: str, lines: int, decorator: str = "") -> str:
    return f"{decorator}\ndef {name}():\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a.py", function("f", 60), 0),
        ("a.py", function("f", 61), 1),
        ("a.py", "class A:\n    async def f(self):\n" + "        pass\n" * 60, 1),
        ("kernels/op/kernel.py", function("f", 150, "@triton.jit"), 0),
        ("kernels/op/kernel.py", function("f", 151, "@triton.jit(debug=True)"), 1),
        ("kernels/op/hopper.py", function("f", 150, "@gluon.jit"), 0),
        ("kernels/op/hopper.py", function("f", 151, "@gluon.jit"), 1),
        ("kernels/op/kernel.py", function("f", 61), 1),  # a helper of a kernel is no kernel
        ("a.py", "x = 1\n" * 400, 0),
        ("a.py", "x = 1\n" * 401, 1),
        ("kernels/op/kernel.py", "x = 1\n" * 600, 0),
        ("kernels/op/kernel.py", "x = 1\n" * 601, 1),
    ],
)
def test_long_code_is_found(tmp_path: Path, name: str, text: str, count: int) -> None:
    assert len(check_lengths(plant(tmp_path, {name: text}))) == count


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("model/mla.py", "import os\nx = os.environ['A']", 1),
        ("model/mla.py", "import os as o\nx = o.getenv('A')", 1),
        ("model/mla.py", "from os import environ", 1),
        ("model/env.py", "import os\nx = os.environ['A']", 1),  # only the top-level env.py may
        ("env.py", "import os\nx = os.environ['A']", 0),
        ("model/mla.py", "import os\nx = os.cpu_count()", 0),
    ],
)
def test_a_stray_variable_is_found(tmp_path: Path, name: str, text: str, count: int) -> None:
    assert len(check_environment(plant(tmp_path, {name: text}))) == count


def test_an_incomplete_operator_is_found(tmp_path: Path) -> None:
    files = {f"kernels/whole/{name}": "" for name in OPERATOR_FILES}
    package = plant(tmp_path, {**files, "kernels/part/__init__.py": "", "demo/run.py": ""})
    assert check_operators(package) == [
        "kernels/part: no cases.py",
        "kernels/part: no reference.py",
    ]
    assert check_demo(package) == ["demo/run.py"]
