"""The commands' table, and what the shell sees when one fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from cyclopts import App, CycloptsError

from kdtree_engine import log
from kdtree_engine.cli.bench import bench
from kdtree_engine.cli.chat import chat
from kdtree_engine.cli.generate import generate
from kdtree_engine.cli.inspect import inspect
from kdtree_engine.cli.make_checkpoint import make_checkpoint
from kdtree_engine.cli.train_drafter import train_drafter
from kdtree_engine.errors import KDTreeError, OptionError

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


def _version() -> str:
    try:
        return f"kdtree-engine {version('kdtree-engine')}"
    except PackageNotFoundError:
        return "kdtree-engine, run from source without being installed"


app = App(
    name="kdtree",
    help="Exact tree-speculative decoding for Kimi-K2-class models.",
    version=_version,
    help_format="plaintext",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
    result_action="return_none",
)
app.command(generate)
app.command(chat)
app.command(inspect)
app.command(bench)
app.command(make_checkpoint)
app.command(train_drafter)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own by default) and return its exit code.

    What a user can cause becomes one line on stderr; a traceback means a bug of ours.
    """
    _open_what_is_closed()
    _never_fail_to_print()
    try:
        log.configure()
        app(arguments)
    except (CycloptsError, OptionError) as error:
        return _complain(str(error), USAGE_ERROR)
    except KDTreeError as error:
        return _complain(str(error), FAILURE)
    except BrokenPipeError:
        return _leave_pipe()
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _complain(named, FAILURE)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def main() -> NoReturn:
    """The console script."""
    sys.exit(run())


def _complain(message: str, code: int) -> int:
    print("kdtree:", " ".join(message.split()), file=sys.stderr)
    return code


def _open_what_is_closed() -> None:
    """A stream that was closed before we began is None: read nothing, write to nowhere."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _never_fail_to_print() -> None:
    """Characters that the terminal's encoding lacks become '?' (a model may write any)."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _leave_pipe() -> int:
    """The reader of stdout has gone (`kdtree generate | head`): end quietly, as other tools do."""
    # The interpreter flushes stdout once more on its way out; there must be somewhere to flush to.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILURE
