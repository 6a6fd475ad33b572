"""Stop texts: find the first one in a text that arrives token by token, and hold back what may yet
become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kdtree_engine.tokenizer.base import TextStream


class StopStream:
    """A detokeniser that ends before the first of some texts.

    Its results joined are the text up to the stop; a stop may begin in one token and end in
    another. It counts once the token that completes it has come. after: tokens that are let through
    unread first; no stop begins in them. `found` is the stop that ended the text.
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
        out = []
        for token in ids:
            if self.found is not None:
                break
            piece = self._text.push([token])
            if self._unread > 0:
                self._unread -= 1
                out.append(piece)
            elif piece:
                out.append(self._read(piece))
        return "".join(out)

    def finish(self) -> str:
        """What is still held back; afterwards the stream is new, but for what it has found."""
        rest = "" if self.found is not None else self._held + self._text.finish()
        self._held = ""
        return rest

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
