"""The tools of the synthetic dialogues and their TypeScript declarations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One argument of a tool; `notes` are the constraint lines that the declaration prints."""

    name: str
    kind: str
    about: str
    required: bool = True
    notes: tuple[str, ...] = ()


TOOLS: dict[str, tuple[str, tuple[Parameter, ...]]] = {
    "get_weather": (
        "Get the current weather of a city.",
        (
            Parameter("city", "string", "Name of the city"),
            Parameter("unit", '"c" | "f"', "Unit of the answer", False, ('Default: "c"',)),
        ),
    ),
    "web_search": (
        "Search the web and return the best result.",
        (
            Parameter("query", "string", "What to search for"),
            Parameter("limit", "number", "Number of results", False, ("maximum: 10, minimum: 1",)),
        ),
    ),
    "read_file": (
        "Read a text file from the project.",
        (Parameter("path", "string", "Path relative to the project"),),
    ),
    "write_file": (
        "Write a text file into the project.",
        (
            Parameter("content", "string", "New text of the file"),
            Parameter("path", "string", "Path relative to the project"),
        ),
    ),
    "list_files": (
        "List the files of a folder.",
        (Parameter("folder", "string", "Folder to list", False),),
    ),
    "calculate": (
        "Evaluate an arithmetic expression.",
        (Parameter("expression", "string", "For example 2 * (3 + 4)"),),
    ),
    "run_python": (
        "Run Python code and return what it prints.",
        (Parameter("code", "string", "Source code"),),
    ),
    "get_time": (
        "Get the local time of a city.",
        (Parameter("city", "string", "Name of the city"),),
    ),
}


def declare(names: list[str]) -> str:
    """The declarations as the K2.6 template prints them: required first, then by name."""
    lines = ["# Tools", "", "## functions", "namespace functions {"]
    for name in names:
        about, parameters = TOOLS[name]
        lines += [f"// {about}", f"type {name} = (_: {{"]
        ordered = sorted(parameters, key=lambda p: (not p.required, p.name))
        for i, parameter in enumerate(ordered):
            lines += [f"  // {line}" for line in (parameter.about, *parameter.notes)]
            mark = "" if parameter.required else "?"
            comma = "," if i + 1 < len(ordered) else ""
            lines.append(f"  {parameter.name}{mark}: {parameter.kind}{comma}")
        lines.append("}) => any;")
    return "\n".join([*lines, "}"]) + "\n"
