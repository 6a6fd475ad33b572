"""Messages and progress on stderr; stdout belongs to a command's result.

Modules log through `logging.getLogger(__name__)`. A program that embeds the engine keeps its own
logging set-up, since `configure` is called by the command alone.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

from kdtree_engine.env import read_environment

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

ROOT = "kdtree_engine"
QUIET_SECONDS = 2.0  # shorter work shows nothing
LINE_SECONDS = 10.0  # between two plain lines


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Looks stderr up when it writes: tests and notebooks replace the stream."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(level: str | None = None) -> None:
    """Send the package's messages to stderr, from `level` (or KDTREE_LOG) up. Idempotent."""
    logger = logging.getLogger(ROOT)
    logger.setLevel((level or read_environment().log_level).upper())
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("kdtree: %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


class Progress(Protocol):
    """Shows how far a long piece of work has come."""

    def advance(self, count: int = 1, note: str = "") -> None:
        """Report `count` more units done; `note` is shown beside the count."""


@contextlib.contextmanager
def progress(
    description: str,
    total: int | None = None,
    *,
    shown: bool = True,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Progress of a block of work of `total` units, None where nobody knows how many.

    On a terminal: a bar that appears after two seconds and leaves nothing behind. Elsewhere: a
    plain line after two seconds, every ten seconds, and at the end of what was announced.
    `shown=False` is silent, for a caller whose output is its own progress.
    """
    out = stream or sys.stderr
    kind = _Silent if not shown else _Bar if out.isatty() else _Lines
    meter = kind(description, total, out, clock)
    try:
        yield meter
    finally:
        meter.close()


class _Silent:
    def __init__(
        self, description: str, total: int | None, stream: TextIO, clock: Callable[[], float]
    ) -> None:
        self._description, self._total = description, total
        self._stream, self._clock = stream, clock
        self._start = clock()
        self._done = 0

    def advance(self, count: int = 1, note: str = "") -> None:
        self._done += count

    def close(self) -> None:
        """Nothing was shown."""


class _Bar(_Silent):
    _bar: RichProgress | None = None

    def advance(self, count: int = 1, note: str = "") -> None:
        self._done += count
        if self._bar is None:
            if self._clock() - self._start < QUIET_SECONDS:
                return
            self._bar = self._open()
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=self._done, note=note)

    def _open(self) -> RichProgress:
        # Imported late: most commands end before a bar is due.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=self._stream),
            transient=True,
        )
        bar.add_task(self._description, total=self._total, note="")
        bar.start()
        return bar

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Lines(_Silent):
    _next: float | None = None  # when a line is due; None before the first
    _said: int | None = None
    _note = ""

    def advance(self, count: int = 1, note: str = "") -> None:
        self._done += count
        self._note = note
        due = self._start + QUIET_SECONDS if self._next is None else self._next
        if self._clock() >= due:
            self._say()

    def _say(self) -> None:
        now = self._clock()
        of = "" if self._total is None else f"/{self._total}"
        note = f", {self._note}" if self._note else ""
        line = f"{self._description}: {self._done}{of}, {now - self._start:.0f} s{note}"
        print(line, file=self._stream, flush=True)
        self._said = self._done
        self._next = now + LINE_SECONDS

    def close(self) -> None:
        # Whoever read "3/10" wants to know how it ended; short work stays silent.
        if self._said is not None and self._said != self._done:
            self._say()
