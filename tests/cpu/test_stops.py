"""Stop texts against a search of the whole text, at every way that tokens cut it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine.tokenizer.base import TextStream
from kdtree_engine.tokenizer.stops import StopStream

LETTERS = st.text("ab\né", min_size=1, max_size=4)


class Pieces(TextStream):
    """Token i is the bytes pieces[i]."""

    def __init__(self, pieces: Sequence[bytes], names: dict[str, int] | None = None) -> None:
        class Bytes:
            special_ids = names or {}

            def token_bytes(self, token: int) -> bytes:
                return pieces[token]

        super().__init__(Bytes(), frozenset())  # type: ignore[arg-type]


def wanted(pieces: Sequence[bytes], stops: Sequence[str], after: int) -> tuple[str, str | None]:
    """The text before the stop that the earliest token completes; of several the first to begin,
    then the longest."""
    begin = len(b"".join(pieces[:after]).decode("utf-8", "ignore"))
    for count in range(after + 1, len(pieces) + 1):
        text = b"".join(pieces[:count]).decode("utf-8", "ignore")
        found = [(text.find(stop, begin), -len(stop), stop) for stop in stops]
        found = [one for one in found if one[0] >= 0]
        if found:
            place, _, stop = min(found)
            return text[:place], stop
    return b"".join(pieces).decode("utf-8", "replace"), None


def cut(text: str, sizes: Iterable[int]) -> list[bytes]:
    """The text's bytes in tokens of these sizes: they may end inside a character."""
    data, pieces = text.encode(), []
    for size in sizes:
        if not data:
            break
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data] if data else pieces


@settings(deadline=None, max_examples=300)
@given(
    st.text("ab\né", max_size=30),
    st.lists(st.integers(1, 5), max_size=30),
    st.lists(LETTERS, max_size=3, unique=True),
    st.integers(0, 4),
    st.data(),
)
def test_every_cut(
    text: str, sizes: list[int], stops: list[str], after: int, data: st.DataObject
) -> None:
    pieces = cut(text, sizes)
    # where letting through ends inside a character, that character belongs to what is read
    stream = StopStream(Pieces(pieces), stops, after)
    got, begin = [], 0
    while begin < len(pieces):
        size = data.draw(st.integers(1, 4))
        got.append(stream.push(range(begin, min(begin + size, len(pieces)))))
        begin += size
    got.append(stream.finish())
    assert ("".join(got), stream.found) == wanted(pieces, stops, after)


def test_nothing_that_may_be_a_stop_is_shown_early() -> None:
    pieces = [b"one", b" st", b"o", b"re", b" sto", b"p more"]
    stream = StopStream(Pieces(pieces), ["stop"])
    assert [stream.push([token]) for token in range(6)] == ["one", " ", "", "store", " ", ""]
    assert stream.found == "stop" and stream.finish() == ""


def test_a_text_without_stops_is_as_it_was() -> None:
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], b"b", b"\xff"]
    stream = StopStream(Pieces(pieces), ())
    assert "".join(stream.push([token]) for token in range(5)) + stream.finish() == "aéb\ufffd"


def test_special_tokens_are_no_text() -> None:
    """A stop matches one by its whole name, not inside it, and not across it."""
    pieces = [b"so th", b"</think>", b"ink", b" stop"]
    names = {"</think>": 1}
    stream = StopStream(Pieces(pieces, names), ["think", "r</", "th</think>ink"])
    assert stream.push(range(4)) + stream.finish() == "so th</think>ink stop"
    assert stream.found is None
    stream = StopStream(Pieces(pieces, names), ["</think>"])
    assert stream.push(range(4)) == "so th" and stream.found == "</think>"
    held = StopStream(Pieces(pieces, names), ["think"])  # what is held is let go before it
    assert held.push([0]) == "so " and held.push([1]) == "th</think>"


def test_tokens_taken_out_count_as_unread() -> None:
    stream = StopStream(Pieces([b"a", b"b"]), ["b"], after=2)
    stream.skip(1)
    assert stream.push([0]) == "a" and stream.push([1]) == "" and stream.found == "b"
