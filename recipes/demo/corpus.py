"""Read the packed corpus: xz files with one JSON object (package, path, text) a line."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The documents of one packed file, in the order they were packed."""
    if not path.is_file():
        raise SystemExit(f"{path}: no packed corpus here; make one with collect.py first")
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def texts(path: Path) -> Iterator[str]:
    """The texts alone."""
    for row in rows(path):
        yield row["text"]


def train_parts(folder: Path) -> list[Path]:
    """The shards of training source; the dialogues are a file of their own."""
    parts = sorted(folder.glob("train-*.jsonl.xz"))
    if not parts:
        raise SystemExit(f"{folder}: no train-*.jsonl.xz here; make them with collect.py first")
    return parts
