"""One answer of a chat: from the tokens of a request to a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kdtree_engine.engine.request import RequestOutput, StepTrace, StreamEvent
from kdtree_engine.errors import OptionError, TokenizerError, shown
from kdtree_engine.tokenizer import Tokenizer
from kdtree_engine.tokenizer.parse import (
    ChatEvent,
    ChatParser,
    ContentDelta,
    Grammar,
    ReasoningDelta,
    Role,
    ToolCallArguments,
    ToolCallBegin,
)
from kdtree_engine.tokenizer.stops import StopStream

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wants made. arguments: what it wrote, which should be JSON and is not
    checked.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """An answer. finish_reason: "stop", "tool_calls", "length" or "error" (then `output.error` says
    why). Where a stop text, the length or an error ended it, anything may be cut short, a call's
    arguments too.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    output: RequestOutput

    def to_dict(self) -> dict[str, Any]:
        """The answer in OpenAI's form, as the history of the next question takes it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, eq=False)
class ChatDelta:
    """What a step added to an answer, perhaps nothing; the last one carries the message."""

    events: list[ChatEvent]
    token_ids: list[int]
    step: StepTrace | None = None
    message: ChatMessage | None = None


class PartialAnswer:
    """Joins events as they come."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[ToolCallBegin, list[str]]] = []

    @property
    def content(self) -> str:
        """The answer so far."""
        return "".join(self._content)

    def add(self, events: Iterable[ChatEvent]) -> None:
        """Take the events of one step."""
        for event in events:
            match event:
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ContentDelta(text):
                    self._content.append(text)
                case ToolCallBegin():
                    self._calls.append((event, []))
                case ToolCallArguments(index, text):
                    self._calls[index][1].append(text)

    def message(self, output: RequestOutput) -> ChatMessage:
        """The answer of a finished request."""
        calls = tuple(
            ToolCall(begin.id, begin.name, "".join(pieces)) for begin, pieces in self._calls
        )
        reason = output.finish_reason
        if isinstance(output.stopped_by, int) and calls:
            reason = "tool_calls"
        return ChatMessage(self.content, "".join(self._reasoning), calls, reason, output)


class TokenReader:
    """Token ids to the events of a parser.

    Where the vocabulary has tokens for the grammar's markers, only these tokens are markers: a file
    that the model writes into a tool's arguments may spell their names out. Other control tokens
    are not shown. stops, after: as in StopStream.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        grammar: Grammar,
        parser: ChatParser,
        stops: Sequence[str] = (),
        after: int = 0,
    ) -> None:
        named = tokenizer.special_ids
        self._parser = parser
        self._markers = {named[marker]: marker for marker in grammar if marker in named}
        self._literal = all(marker in named or role is Role.END for marker, role in grammar.items())
        text = tokenizer.stream(skip=tokenizer.hidden_ids - self._markers.keys())
        self._text = StopStream(text, stops, after)

    def push(self, ids: Iterable[int]) -> list[ChatEvent]:
        """What these tokens complete."""
        events: list[ChatEvent] = []
        for marker, run in groupby(ids, key=self._markers.get):
            if marker is None:
                events += self._parser.push(self._text.push(run), self._literal)
                continue
            events += self._parser.push(self._text.finish(), self._literal)
            for _ in run:
                self._text.skip(1)
                events += self._parser.push(marker)
        return events

    def finish(self, cut: bool = True) -> list[ChatEvent]:
        """The rest, where the output ends. cut: as in `ChatParser.finish`."""
        return self._parser.push(self._text.finish(), self._literal) + self._parser.finish(cut)


def read_answer(stream: Iterator[StreamEvent], reader: TokenReader) -> Iterator[ChatDelta]:
    """The steps of a request as those of an answer."""
    answer = PartialAnswer()
    for step in stream:
        # The token that stopped it may be any of `stop_token_ids`; it is not part of the text.
        by_token = step.output is not None and isinstance(step.output.stopped_by, int)
        events = reader.push(step.token_ids[:-1] if by_token else step.token_ids)
        if step.output is not None:
            events += reader.finish(cut=not by_token)
        answer.add(events)
        message = None if step.output is None else answer.message(step.output)
        yield ChatDelta(events, step.token_ids, step.step, message)


def check_messages(messages: object) -> int:
    """How many tool calls a dialogue has. Raises OptionError where it cannot be one.

    What a message holds is checked where it is rendered; here is how they follow each other.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise OptionError(f"messages must be a list of objects, not {type(messages).__name__}")
    if not messages:
        raise OptionError("messages is empty; give at least one, from the user")
    calls: list[object] = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in ROLES:
            found = (
                f"has the role {shown(role)}" if isinstance(message, Mapping) else "is no object"
            )
            raise OptionError(f"message {index} {found}: expected a role of {', '.join(ROLES)}")
        if role == "assistant":
            calls += _call_ids(message, index)
        if role == "tool":
            answered = message.get("tool_call_id")
            if not isinstance(answered, str | None) or answered not in calls:
                raise OptionError(
                    f"message {index} has the tool_call_id {shown(answered)}, but no message "
                    "before it has a tool call of that id"
                )
    return len(calls)


def _call_ids(message: Message, index: int) -> list[object]:
    calls = message.get("tool_calls")
    calls = [] if calls is None else calls
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise OptionError(f"message {index}: tool_calls must be a list of objects")
    ids = [call.get("id") for call in calls]
    if not all(isinstance(one, str | None) for one in ids):
        raise OptionError(f"message {index}: the id of a tool call must be text")
    return ids


def check_tools(tools: object) -> None:
    """Raises TokenizerError for tools that are no list, as where each of them is checked."""
    if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, str | bytes)):
        raise TokenizerError(f"tools must be a list of objects, not {type(tools).__name__}")


def tool_names(tools: Sequence[Tool] | None) -> list[str]:
    """The names of the declared functions (whose form is checked where they are rendered)."""
    functions = [tool.get("function") for tool in tools or ()]
    return [str(one["name"]) for one in functions if isinstance(one, Mapping) and "name" in one]
