"""The environment variables of the engine; nothing else in the package reads `os.environ`.

Options that a caller would set per model or per request are arguments, not variables: what stands
here belongs to the machine. docs/env.md lists the same names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from kdtree_engine.errors import OptionError

LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_THREADS = 1024


@dataclass(frozen=True)
class Environment:
    """What the variables say, checked."""

    log_level: str = "warning"  # KDTREE_LOG
    threads: int | None = None  # KDTREE_THREADS: torch's threads on the CPU, None = torch decides


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the process's variables, or `variables`. Raises OptionError, which names the variable.

    An empty variable counts as unset, so that a shell can clear it for one command.
    """
    found = os.environ if variables is None else variables
    level = found.get("KDTREE_LOG", "").lower() or Environment.log_level
    if level not in LOG_LEVELS:
        raise OptionError(f"KDTREE_LOG is {level!r}: expected one of {', '.join(LOG_LEVELS)}")
    return Environment(log_level=level, threads=_threads(found.get("KDTREE_THREADS", "")))


def hub_cache(variables: Mapping[str, str] | None = None) -> Path:
    """Where Hugging Face's tools keep downloads: HF_HUB_CACHE, its older name
    HUGGINGFACE_HUB_CACHE, or `hub` in HF_HOME.

    HF_HOME is `huggingface` in XDG_CACHE_HOME, which is ~/.cache, unless they are set. Values may
    hold `~` and other variables ($SCRATCH/hf), as there. Raises OptionError for a `~` that has no
    home.
    """
    found = os.environ if variables is None else variables

    def path(name: str, text: str) -> Path:
        try:
            return Path(Template(text).safe_substitute(found)).expanduser()
        except RuntimeError as error:
            raise OptionError(
                f"{name} is {text!r:.200}, whose ~ has no home directory; give a whole path"
            ) from error

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if found.get(name):
            return path(name, found[name])
    if found.get("HF_HOME"):
        return path("HF_HOME", found["HF_HOME"]) / "hub"
    home = path("XDG_CACHE_HOME", found.get("XDG_CACHE_HOME") or "~/.cache")
    return home / "huggingface" / "hub"


def _threads(text: str) -> int | None:
    if not text:
        return None
    # The length comes first: int() refuses thousands of digits with an error of its own.
    short = len(text) <= len(str(MAX_THREADS))
    count = int(text) if short and text.isascii() and text.isdecimal() else 0
    if not 1 <= count <= MAX_THREADS:
        raise OptionError(
            f"KDTREE_THREADS is {text!r:.60}: expected a number from 1 to {MAX_THREADS}"
        )
    return count
