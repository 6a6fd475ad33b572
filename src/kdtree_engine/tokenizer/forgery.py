"""A template's output as parts, of which only the template's own marks are special tokens.

A template gives plain text, in which a special token's name looks alike whether the template or a
user wrote it. So every user's text is rendered with *marked* characters: the characters that names
of special tokens begin or end with (`<`, `>`, `[`, ...) are replaced by private ones, which no
name contains. In the result, whatever still reads as a name is the template's own; then the
characters are put back. Text in between is otherwise what it was, so templates may trim, split
and compare it.

A template may look for such a name in a message: DeepSeek-R1's drops what stands before `</think>`.
Then the marked rendering differs from the plain one, and the plain one is taken if it has the same
special tokens in the same order, that is, if no message added or removed one. Otherwise the
dialogue is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import TokenizerError, shown
from kdtree_engine.tokenizer.base import Part, split_names
from kdtree_engine.tokenizer.messages import (
    Message,
    Tool,
    calls_of,
    plain,
    plain_tools,
    reasoning_of,
    role_of,
    texts_of,
)
from kdtree_engine.tokenizer.template import Template

# Templates make marks of roles ('<|' + role + '|>'), so no other may come from a user.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
PRIVATE = range(0xF0000, 0xFFFFE)


def template_parts(
    template: Template,
    names: Sequence[str],
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    switches: Mapping[str, Any],
) -> list[Part]:
    """The parts of a dialogue's prompt. names: of the vocabulary's special tokens.

    Raises TokenizerError for roles outside ROLES, for messages and tools of another form, for what
    the template refuses, and for text with a special token's name that cannot be told apart.
    """
    dialogue = [_prepared(index, message) for index, message in enumerate(messages)]
    listed = plain_tools(tools) if tools else None
    texts = list(_strings([dialogue, listed]))
    _refuse_bare(names, texts)
    marks = _marks(names, template.source, texts)
    text = template.render({"messages": dialogue, "tools": listed, **switches})
    if not marks:
        return split_names(text, names)
    table = str.maketrans(marks)
    back = str.maketrans({mark: char for char, mark in marks.items()})
    hidden = {"messages": _marked(dialogue, table), "tools": _marked(listed, table)}
    for message, original in zip(hidden["messages"], dialogue, strict=True):
        message["role"] = original["role"]
    parts = split_names(template.render({**hidden, **switches}), names)
    parts = [(piece if special else piece.translate(back), special) for piece, special in parts]
    if "".join(piece for piece, _ in parts) == text:
        return parts
    visible = split_names(text, names)
    own = [piece for piece, special in parts if special]
    found = [piece for piece, special in visible if special]
    if own != found:
        name = next((name for name in found if found.count(name) != own.count(name)), "a special")
        raise TokenizerError(
            f"a message contains {name}, which this model's chat template takes for its own mark; "
            "remove it from the message"
        )
    return visible


def _prepared(index: int, message: Message) -> dict[str, Any]:
    """A message as templates expect it: content as text, no field that is not known."""
    role = role_of(index, message)
    if role not in ROLES:
        raise TokenizerError(f"message {index} has the role {shown(role)}; use {', '.join(ROLES)}")
    calls = calls_of(message)
    content = message.get("content")
    prepared: dict[str, Any] = {"role": role}
    if content is None and calls:
        prepared["content"] = None
    else:
        prepared["content"] = "".join(text or "" for text in texts_of(content))
    if calls:
        prepared["tool_calls"] = plain(calls, "tool calls")
    if reasoning := reasoning_of(message):
        prepared["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise TokenizerError(f"{key!r} in message {index} must be text")
            prepared[key] = message[key]
    return prepared


def _strings(value: Any) -> Iterator[str]:
    """Every string of a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _can_mark(name: str) -> bool:
    return not any(char.isalnum() or char.isspace() or char == "_" for char in (name[0], name[-1]))


def _refuse_bare(names: Sequence[str], texts: Sequence[str]) -> None:
    """Names that begin or end like a word cannot be marked: no text may contain one."""
    bare = [name for name in names if not _can_mark(name)]
    for name in bare:
        if any(name in text for text in texts):
            raise TokenizerError(f"a message contains the special token {name}; remove it")


def _marks(names: Sequence[str], source: str, texts: Sequence[str]) -> dict[str, str]:
    """Private characters for those that names begin or end with and that occur in the texts."""
    edges = {char for name in names if _can_mark(name) for char in (name[0], name[-1])}
    used = set(source).union(*texts)
    wanted = sorted(edges.intersection(*[set().union(*texts)]))
    free = (chr(code) for code in PRIVATE if chr(code) not in used)
    return dict(zip(wanted, free, strict=False))


def _marked(value: Any, table: Mapping[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, dict):
        return {_marked(key, table): _marked(inner, table) for key, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, table) for inner in value]
    return value
