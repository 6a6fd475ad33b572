"""What the documents, the Makefile and the docstrings point at is there.

Each check takes a folder, so that the tests below also run it over planted mistakes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

LINK = re.compile(r"\]\(\s*<?([^)>\s]+)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)  # https:, mailto:
MADE_FILE = re.compile(r"(?<![\w./-])(?!\.venv)[\w./-]+\.(?:py|txt|toml|md|json|sh)\b")
DOCUMENT = re.compile(r"\bdocs/[\w./-]+?\.md\b")


def documents(root: Path) -> list[Path]:
    return [root / "README.md", *sorted(root.glob("docs/*.md")), *root.glob("recipes/*/*.md")]


def links(path: Path) -> list[str]:
    """Targets of a Markdown file's relative links, without the place inside the target."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    targets = [target.partition("#")[0] for target in LINK.findall(text)]
    return [target for target in targets if target and not ELSEWHERE.match(target)]


def check_links(root: Path) -> list[str]:
    """Relative links that lead nowhere, or out of the repository."""
    wrong = []
    for path in documents(root):
        for target in links(path):
            found = (path.parent / target).resolve()
            if not found.exists() or not found.is_relative_to(root.resolve()):
                wrong.append(f"{path.relative_to(root)}: {target}")
    return wrong


def check_makefile(root: Path) -> list[str]:
    """Files that the Makefile names and that are not there."""
    named = MADE_FILE.findall((root / "Makefile").read_text(encoding="utf-8"))
    return [name for name in dict.fromkeys(named) if not (root / name).is_file()]


def check_docstrings(root: Path) -> list[str]:
    """Pages of docs/ that source and benches name and that are not there."""
    wrong = []
    for path in [*sorted(root.glob("src/**/*.py")), *sorted(root.glob("benches/**/*.py"))]:
        for name in DOCUMENT.findall(path.read_text(encoding="utf-8")):
            if not (root / name).is_file():
                wrong.append(f"{path.relative_to(root)}: {name}")
    return wrong


def test_links_lead_somewhere() -> None:
    assert len(documents(REPOSITORY)) > 8
    assert sum(len(links(path)) for path in documents(REPOSITORY)) > 10
    assert check_links(REPOSITORY) == []


def test_files_of_the_makefile_are_there() -> None:
    named = MADE_FILE.findall((REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    assert {"constraints.txt", "tests/e2e/exact.py"} <= set(named)
    assert check_makefile(REPOSITORY) == []


def test_pages_named_in_the_source_are_there() -> None:
    assert check_docstrings(REPOSITORY) == []


# The checks themselves, on planted mistakes.


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project without a mistake."""
    files = {
        "README.md": "[a](docs/a.md) [b](<docs/a.md>) [c](https://x.org/no.md) [d](#here)\n",
        "docs/a.md": "[up](../README.md#title) [src](../src)\n```\n[no](link.md)\n```\n",
        "Makefile": "test: constraints.txt\n\t.venv/bin/python tests/run.py .venv/x.py\n",
        "constraints.txt": "",
        "tests/run.py": "",
        "src/package/one.py": '"""See docs/a.md, and mydocs/b.md."""\n',
    }
    root = tmp_path / "project"
    for name, text in files.items():
        write(root, name, text)
    return root


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_good_project_has_no_mistakes(project: Path) -> None:
    assert check_links(project) == check_makefile(project) == check_docstrings(project) == []


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("README.md", "[a](docs/b.md)", "README.md: docs/b.md"),
        ("README.md", "![a](a.png 'title')", "README.md: a.png"),
        ("docs/a.md", "[a](docs/a.md)", "docs/a.md: docs/a.md"),
        ("docs/a.md", "x\n```\ncode\n```\n[a](b.md#part)", "docs/a.md: b.md"),
        ("docs/a.md", "[a](../../project/../outside.md)", "docs/a.md: ../../project/../outside.md"),
    ],
)
def test_a_dead_link_is_found(project: Path, name: str, text: str, wrong: str) -> None:
    write(project.parent, "outside.md", "")
    write(project, name, text)
    assert check_links(project) == [wrong]


def test_a_missing_file_of_the_makefile_is_found(project: Path) -> None:
    write(project, "Makefile", "bench:\n\t@.venv/bin/python benches/decode.py --x=1\n")
    assert check_makefile(project) == ["benches/decode.py"]


def test_a_missing_page_in_a_docstring_is_found(project: Path) -> None:
    write(project, "src/package/two.py", 'def f():\n    """Why: docs/reasons.md."""\n')
    assert check_docstrings(project) == ["src/package/two.py: docs/reasons.md"]
