"""What a model wrote, as it arrives: reasoning, content and tool calls.

The grammar (docs/vocabulary.md names the markers):

    [reasoning] </think> [content]
    [ section ( call ID arguments JSON end-of-call )+ end-of-section ] <|im_end|>

Models deviate from it, and an agent should not lose a call to that. So every state takes every
marker: what a marker means where it stands is looked up in one table, `_MOVES`; one that means
nothing there is left out, never shown. Nothing is parsed twice and nothing is evaluated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A tool call: its place in this answer from 0 on, its id and the tool's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments: JSON as far as the model wrote JSON, passed on unread."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The call is complete, or will not be continued."""

    index: int


ChatEvent = ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallArguments | ToolCallEnd


class Role(Enum):
    """What a marker stands for."""

    THINK = auto()
    END_THINK = auto()
    SECTION = auto()
    END_SECTION = auto()
    CALL = auto()
    ARGUMENTS = auto()
    END_CALL = auto()
    END = auto()


Grammar = Mapping[str, Role]  # marker -> what it stands for; every marker begins with "<"

_THINKING: Grammar = {"<think>": Role.THINK, "</think>": Role.END_THINK}
K2: Grammar = {
    "<|tool_calls_section_begin|>": Role.SECTION,
    "<|tool_calls_section_end|>": Role.END_SECTION,
    "<|tool_call_begin|>": Role.CALL,
    "<|tool_call_argument_begin|>": Role.ARGUMENTS,
    "<|tool_call_end|>": Role.END_CALL,
    "<|im_end|>": Role.END,
}
K2_THINKING: Grammar = {**_THINKING, **K2}
PLAIN: Grammar = {**_THINKING, "<\uff5cend\u2581of\u2581sentence\uff5c>": Role.END}

_GRAMMARS = {"k2": K2, "k2-thinking": K2_THINKING, "k2.5": K2_THINKING, "k2.6": K2_THINKING}


def output_grammar(family: str) -> Grammar:
    """The markers of a chat family; of one that is not Kimi's, the thinking markers alone."""
    return _GRAMMARS.get(family, PLAIN)


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    TOOLS = auto()  # in a section or after one: whitespace round what is written here is layout
    HEADER = auto()  # a call's id
    ARGUMENTS = auto()
    DONE = auto()


_TO_TOOLS = dict.fromkeys((Role.SECTION, Role.END_SECTION, Role.END_CALL), _State.TOOLS)
_CALLING = {**_TO_TOOLS, Role.CALL: _State.HEADER}  # each of these also ends a running call
_OPENING = {Role.SECTION: _State.TOOLS, Role.CALL: _State.HEADER}  # with or without a section
_MOVES: dict[_State, dict[Role, _State]] = {
    _State.REASONING: {**_OPENING, Role.END_THINK: _State.CONTENT},
    _State.CONTENT: {**_OPENING, Role.THINK: _State.REASONING},
    _State.TOOLS: {**_CALLING, Role.THINK: _State.REASONING},
    _State.HEADER: {**_CALLING, Role.ARGUMENTS: _State.ARGUMENTS},
    _State.ARGUMENTS: _CALLING,
}
# Inside a call these are the call's own text: code about thinking models has them, too.
_AS_TEXT = {
    _State.HEADER: {Role.THINK, Role.END_THINK},
    _State.ARGUMENTS: {Role.THINK, Role.END_THINK, Role.ARGUMENTS},
}


class ChatParser:
    """Reads one answer piece by piece; however it is cut, the joined events are the same.

    reasoning: whether the prompt already opened the reasoning (`starts_in_reasoning`). first_call:
    how many tool calls the dialogue had before, which continues their numbers. tool_names: the
    declared tools, for a model that leaves the name out. Time is linear in the text.
    """

    def __init__(
        self,
        grammar: Grammar = K2_THINKING,
        reasoning: bool = False,
        first_call: int = 0,
        tool_names: Collection[str] = (),
    ) -> None:
        self._grammar = grammar
        self._scanner = _Scanner(grammar)
        self._state = _State.REASONING if reasoning else _State.CONTENT
        self._names = _Names(first_call, tool_names)
        self._header: list[str] = []
        self._layout = _Layout()
        self._calls = 0

    @property
    def ended(self) -> bool:
        """Whether the message is over: what comes after its end marker is not part of it."""
        return self._state is _State.DONE

    def push(self, text: str, literal: bool = False) -> list[ChatEvent]:
        """What `text` completes. literal: text that is known to hold no markers, whatever it says
        (a vocabulary with tokens for the markers tells them from their names).
        """
        pieces = self._scanner.literal(text) if literal else self._scanner.push(text)
        return self._read(pieces)

    def finish(self, cut: bool = True) -> list[ChatEvent]:
        """The rest, where the output ends. cut: it broke off, rather than being stopped by the
        model; then a call without its id's end is left out.
        """
        events = self._read(self._scanner.literal(""))
        if cut and self._state is _State.HEADER:
            self._header.clear()
        events += self._leave()
        self._state = _State.DONE
        return events

    def _read(self, pieces: Iterator[tuple[str, bool]]) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        for text, is_marker in pieces:
            if self._state is _State.DONE:
                continue
            role = self._grammar[text] if is_marker else None
            if role is None or role in _AS_TEXT.get(self._state, ()):
                events += self._text(text)
            elif role is Role.END:
                events += self._leave()
                self._state = _State.DONE
            else:
                events += self._move(role)
        return events

    def _text(self, text: str) -> list[ChatEvent]:
        match self._state:
            case _State.REASONING:
                return [ReasoningDelta(text)]
            case _State.ARGUMENTS:
                return [ToolCallArguments(self._calls - 1, text)]
            case _State.HEADER:
                self._header.append(text)
                return []
            case _State.TOOLS:
                text = self._layout.inside(text)
        return [ContentDelta(text)] if text else []

    def _move(self, role: Role) -> list[ChatEvent]:
        target = _MOVES[self._state].get(role)
        if target is None:
            return []
        events = self._begin() if target is _State.ARGUMENTS else self._leave()
        self._state = target
        self._layout = _Layout()
        return events

    def _leave(self) -> list[ChatEvent]:
        """End the call that is running, if one is."""
        if self._state is _State.ARGUMENTS:
            return [ToolCallEnd(self._calls - 1)]
        if self._state is _State.HEADER:
            # Without an arguments marker they may follow the id directly.
            head, brace, tail = "".join(self._header).partition("{")
            self._header = [head]
            if not head.strip():
                self._header.clear()
                return []
            events = self._begin()
            index = self._calls - 1
            if brace:
                events.append(ToolCallArguments(index, brace + tail))
            return [*events, ToolCallEnd(index)]
        return []

    def _begin(self) -> list[ChatEvent]:
        id, name = self._names.of("".join(self._header))
        self._header.clear()
        self._calls += 1
        return [ToolCallBegin(self._calls - 1, id, name)]


class _Scanner:
    """Cuts text into runs and markers, and holds back a tail that may become a marker."""

    def __init__(self, markers: Collection[str]) -> None:
        # One "<" each: the search goes on behind it, inside a marker or not.
        assert all(marker.rfind("<") == 0 and len(marker) > 1 for marker in markers)
        self._markers = tuple(markers)
        self._prefixes = {marker[:n] for marker in markers for n in range(1, len(marker))}
        assert not self._prefixes & set(markers), "a marker begins another"
        self._longest = max(map(len, self._prefixes), default=0)
        self._held = ""

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """(text, whether it is a marker). Every '<' is looked at once: bounded work a character."""
        text, self._held = self._held + text, ""
        start = 0
        at = text.find("<")
        while at >= 0:
            marker = self._at(text, at)
            if marker:
                if at > start:
                    yield text[start:at], False
                yield marker, True
                start = at + len(marker)
            elif len(text) - at <= self._longest and text[at:] in self._prefixes:
                self._held = text[at:]
                break
            at = text.find("<", at + 1)
        end = len(text) - len(self._held)
        if end > start:
            yield text[start:end], False

    def literal(self, text: str) -> Iterator[tuple[str, bool]]:
        """Text that completes no marker; what was held back is text as well, then."""
        text, self._held = self._held + text, ""
        if text:
            yield text, False

    def _at(self, text: str, at: int) -> str:
        """The marker that stands at a place, "" where none does."""
        if not text.startswith(self._markers, at):
            return ""
        return next(marker for marker in self._markers if text.startswith(marker, at))


class _Layout:
    """Drops whitespace before and after a run of text, keeps it inside."""

    def __init__(self) -> None:
        self._begun = False
        self._spaces: list[str] = []

    def inside(self, text: str) -> str:
        """What `text` completes: trailing whitespace waits for what comes."""
        if not self._begun:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            if self._begun:
                self._spaces.append(text)
            return ""
        spaces = "".join(self._spaces)
        self._begun, self._spaces = True, [text[len(body) :]]
        return spaces + body


class _Names:
    """Ids and names of calls: `functions.NAME:NUMBER` as it should be, and what models make of it.

    An id in the right form stays as it is, since the model will see it again; any other, and one
    that came before in this answer, is written anew with the call's own number.
    """

    def __init__(self, first_call: int, tool_names: Collection[str]) -> None:
        self._number = first_call  # the least that a call's own number may be now
        self._only = next(iter(tool_names)) if len(tool_names) == 1 else None
        self._given: set[str] = set()

    def of(self, header: str) -> tuple[str, str]:
        """The id and the name that the next call's header means."""
        head = header.strip()
        stem, _, number = head.rpartition(":")
        numbered = _is_number(number.strip())
        name = (stem if numbered else head).strip().removeprefix("functions.")
        if not name:  # a bare number
            name = self._only or head
        id = head
        if not numbered or head != f"functions.{name}:{number}" or head in self._given:
            id = self._new(name)
        self._given.add(id)
        self._number += 1
        return id, name

    def _new(self, name: str) -> str:
        # The number only rises, or ids made to collide would cost quadratic time.
        while (id := f"functions.{name}:{self._number}") in self._given:
            self._number += 1
        return id


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
