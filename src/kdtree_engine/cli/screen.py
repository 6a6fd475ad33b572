"""Where a conversation is shown and typed: a terminal, or plain streams."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kdtree_engine.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from kdtree_engine.tokenizer.parse import ChatEvent

PROMPT = "> "
# A model may write any character; those that steer a terminal are shown as unknown instead.
_STEERING = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
_STEERING = {code: mark for code, mark in _STEERING.items() if chr(code) not in "\n\t"}


class Screen:
    """Answers on stdout, everything else on stderr: what a pipe wants."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()  # whether somebody types
        self._open = ""  # what the unfinished line holds: "reasoning", "content", "call", or ""

    def ask(self) -> str | None:
        """The next line that was typed or sent, None where there are no more."""
        while True:
            try:
                line = self._read()
            except EOFError:
                if self.interactive:
                    self.note("")  # the shell's prompt comes on a line of its own
                return None
            except UnicodeDecodeError as error:
                raise OptionError(f"stdin is not UTF-8 (byte {error.start} of a line)") from error
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.note("")  # as shells do: the line is dropped
                continue
            try:
                line.encode()
            except UnicodeEncodeError as error:
                if not self.interactive:  # answers would no longer fit their questions
                    raise OptionError(
                        f"stdin is not UTF-8 (byte {error.start} of a line)"
                    ) from error
                self.note("the line is not UTF-8; it was not sent")
                continue
            return line

    def show(self, events: Iterable[ChatEvent]) -> None:
        """A piece of an answer."""
        from kdtree_engine.tokenizer.parse import (
            ContentDelta,
            ReasoningDelta,
            ToolCallArguments,
            ToolCallBegin,
        )

        for event in events:
            match event:
                case ReasoningDelta(text):
                    self._piece("reasoning", text)
                case ContentDelta(text):
                    self._piece("content", text)
                case ToolCallBegin(name=name):
                    self.end_answer()
                    self._piece("call", f"calls {name} ")
                case ToolCallArguments(text=text):
                    self._piece("call", text)

    def note(self, text: str) -> None:
        """A line about the conversation."""
        print(f"kdtree: {text}" if text else "", file=sys.stderr, flush=True)

    def end_answer(self) -> None:
        """End the line that is open, if one is."""
        if self._open:
            self._write(self._open, "\n")
        self._open = ""

    def _piece(self, kind: str, text: str) -> None:
        if kind != self._open:
            self.end_answer()
            text = text.lstrip("\n")
        if text:
            self._write(kind, text)
            self._open = kind

    def _write(self, kind: str, text: str) -> None:
        out = sys.stdout if kind == "content" else sys.stderr
        out.write(text.translate(_STEERING) if out.isatty() else text)
        out.flush()

    def _read(self) -> str:
        if self.interactive:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line


class Terminal(Screen):
    """Everything on the terminal, reasoning and notes dim."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console

        self._console: Console = Console()
        # It gives input() line editing and the lines typed before; Windows has none.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401

    def note(self, text: str) -> None:
        """A line about the conversation."""
        self._console.out(text.translate(_STEERING), style="dim", highlight=False)

    def _write(self, kind: str, text: str) -> None:
        style = None if kind == "content" else "dim"
        # out(), unlike print(), leaves tabs and line ends to the terminal: this is half a line.
        self._console.out(text.translate(_STEERING), style=style, end="", highlight=False)
        self._console.file.flush()

    def _read(self) -> str:
        return input(PROMPT)


def open_screen() -> Screen:
    """The terminal where both ends are one, else plain streams."""
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Screen()
