"""Set-up installs the versions that the tests ran with: whatever is asked for is pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
NAME = re.compile(r"[A-Za-z0-9._-]+")


def canonical(name: str) -> str:
    """PEP 503's form of a package's name, in which spellings agree."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines: str) -> dict[str, str]:
    """Version by name; only exact versions count."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)$", lines, re.MULTILINE)
    return {canonical(name): version for name, version in found}


def check(project: dict[str, Any], constraints: str) -> list[str]:
    """Lines of constraints.txt without an exact version, requirements without a pin, and build
    requirements (which pip installs without the constraints) that do not say the pinned version.
    """
    pinned = pins(constraints)
    lines = [line for line in constraints.splitlines() if line and not line.startswith("#")]
    wrong = [line for line in lines if not pins(line)]
    wanted = list(project["project"]["dependencies"])
    for extra in project["project"].get("optional-dependencies", {}).values():
        wanted += extra
    for requirement in wanted:
        name = NAME.match(requirement)
        if name is None or canonical(name[0]) not in pinned:
            wrong.append(requirement)
    for requirement in project["build-system"]["requires"]:
        if not pins(requirement).items() <= pinned.items() or not pins(requirement):
            wrong.append(requirement)
    return wrong


def test_everything_is_pinned() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert len(project["project"]["optional-dependencies"]["dev"]) > 5
    assert check(project, (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")) == []


def test_what_is_not_pinned_is_found() -> None:
    project = {
        "build-system": {"requires": ["setuptools==2.0", "wheel>=1"]},
        "project": {
            "dependencies": ["torch>=2", "Typing_Extensions>=4", "lost"],
            "optional-dependencies": {"dev": ["ruff>=0.1", "absent==1.0"]},
        },
    }
    constraints = "# all\nsetuptools==3.0\ntorch==2.1\ntyping-extensions==4.1\nruff==1.0\nmypy>=1\n"
    wrong = ["mypy>=1", "lost", "absent==1.0", "setuptools==2.0", "wheel>=1"]
    assert check(project, constraints) == wrong
