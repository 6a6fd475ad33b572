"""Stop texts: find the first one in a text that arrives token by token, and hold back what may yet
become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kdtree_engine.tokenizer.base import TextStream


class StopStream:
    """A detokeniser that ends before the first of some texts.

    Its results joined are the text up to the stop; a stop may begin in one token and end in
    another. It counts once the token that completes it has come. A special token is no text: it
    stops where a stop is its whole name, and no stop reaches across it. after: tokens that are let
    through unread first; no stop begins in them. `found` is the stop that ended the text.
    """

    def __init__(self, text: TextStream, stops: Sequence[str], after: int = 0) -> None:
        self.found: str | None = None
        self._text = text
        self._stops = stops
        self._unread = after
        self._held = ""
        self._longest = max(map(len, stops), default=0)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens release, perhaps empty; nothing once a stop was found."""
        if not self._stops:
            return self._text.push(ids)
        out = []
        for token in ids:
            if self.found is not None:
                break
            name = self._text.special(token)
            if self._unread > 0:
                self._unread -= 1
                out.append(self._text.push([token]))
            elif name is not None:
                out.append(self._pass(token, name))
            else:
                out.append(self._read(self._text.push([token])))
        return "".join(out)

    def skip(self, count: int) -> None:
        """Count tokens that whoever reads the text takes out of it."""
        self._unread = max(0, self._unread - count)

    def finish(self) -> str:
        """What is still held back; afterwards the stream is new, but for what it has found."""
        rest = "" if self.found is not None else self._held + self._text.finish()
        self._held = ""
        return rest

    def _pass(self, token: int, name: str) -> str:
        held, self._held = self._held, ""
        if name in self._stops:
            self.found = name
            return held + self._text.finish()
        return held + self._text.push([token])

    def _read(self, piece: str) -> str:
        held = self._held + piece
        begins = [(held.find(stop), stop) for stop in self._stops]
        begins = [(begin, stop) for begin, stop in begins if begin >= 0]
        if begins:
            begin, self.found = min(begins, key=lambda one: (one[0], -len(one[1])))
            self._held = ""
            return held[:begin]
        keep = self._beginning(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def _beginning(self, held: str) -> int:
        """Length of the longest end of `held` with which a stop begins."""
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            if any(stop.startswith(held[-length:]) for stop in self._stops):
                return length
        return 0
