"""Messages in OpenAI's form: what a dialogue may hold, checked before anything is rendered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kdtree_engine.errors import TokenizerError, shown

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# JSON inside JSON: far more than tools in use, far less than Python's stack.
MAX_DEPTH = 100
MAX_BITS = 10_000  # Python refuses to print numbers of over 4,300 digits
IMAGE_KEYS = ("image", "image_url")
REASONING_KEYS = ("reasoning_content", "reasoning")


def role_of(index: int, message: Any) -> str:
    """The role of message `index`. Raises TokenizerError where it is no message."""
    if not isinstance(message, Mapping):
        raise TokenizerError(
            f"message {index} must be an object with a role, not {type(message).__name__}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TokenizerError(f"message {index} has no role")
    return role


def texts_of(content: Any) -> list[str | None]:
    """A message's content as its text parts in order, with None for an image.

    content: a string, None, or a list of parts. Raises TokenizerError for any other part.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise TokenizerError(
            f"message content must be text or a list, not {type(content).__name__}"
        )
    return [_part(part) for part in content]


def _part(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(kind, str | None):
        raise TokenizerError(f"a content part has the type {shown(kind)}, expected text")
    if isinstance(part, Mapping) and (kind in IMAGE_KEYS or any(key in part for key in IMAGE_KEYS)):
        return None
    if kind != "text":
        raise TokenizerError(f"message content of type {shown(kind)} is not supported, only text")
    if not isinstance(part.get("text"), str):
        raise TokenizerError("a content part of type 'text' needs a 'text'")
    return str(part["text"])


def refuse_images(messages: Sequence[Message]) -> None:
    """Raises TokenizerError if a message holds an image: the engine has no vision tower."""
    for index, message in enumerate(messages):
        role_of(index, message)
        if None in texts_of(message.get("content")):
            raise TokenizerError(f"message {index} holds an image; only text is supported")


def reasoning_of(message: Message) -> str:
    """The reasoning of an assistant's message, from either of the fields clients use."""
    for key in REASONING_KEYS:
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise TokenizerError(f"{key!r} must be text, not {type(value).__name__}")
        if value:
            return value
    return ""


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    """The tool calls of a message. Raises TokenizerError where one is not of OpenAI's form."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TokenizerError(f"'tool_calls' must be a list, not {type(calls).__name__}")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(call.get("id", ""), str | None):
            raise TokenizerError("a tool call in a message needs an 'id' and a 'function'")
    return list(calls)


def arguments_of(call: Mapping[str, Any]) -> str:
    """The arguments of a call: text as it is, None as nothing, anything else as JSON."""
    arguments = call["function"].get("arguments")
    if arguments is None:
        return ""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(plain(arguments, "tool call arguments"), ensure_ascii=False)


def rewrite_ids(messages: Sequence[Message]) -> list[Message]:
    """The dialogue with its tool calls named as the Kimi models name them.

    Call number i of the dialogue (from 0) becomes `functions.NAME:i`, and the results that refer
    to it follow; other ids in the history make the models' own calls worse. A result belongs to
    the latest call of its id; one without an id answers the first open call. A result of an
    unknown id stays as it is.
    """
    rewritten: list[Message] = []
    open_calls: dict[str | None, list[str]] = {}
    count = 0
    for index, message in enumerate(messages):
        role = role_of(index, message)
        changed = dict(message)
        if role == "assistant" and message.get("tool_calls"):
            calls = calls_of(message)
            changed["tool_calls"] = [_renamed(call, count + i) for i, call in enumerate(calls)]
            count += len(calls)
            fresh: dict[str | None, list[str]] = {None: []}
            for old, new in zip(calls, changed["tool_calls"], strict=True):
                fresh.setdefault(old.get("id"), []).append(new["id"])
                if old.get("id") is not None:
                    fresh[None].append(new["id"])
            open_calls.update(fresh)
        elif role == "tool":
            changed["tool_call_id"] = _answered(message.get("tool_call_id"), open_calls)
        rewritten.append(changed)
    return rewritten


def _renamed(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    name = call["function"].get("name")
    if not isinstance(name, str) or not name:
        raise TokenizerError("a tool call in a message needs a function 'name'")
    return {**call, "id": f"functions.{name}:{number}"}


def _answered(old: Any, open_calls: dict[str | None, list[str]]) -> Any:
    """The new id of the call that a result answers, and that call's turn to be over."""
    if old is not None and not isinstance(old, str):
        raise TokenizerError(f"'tool_call_id' must be text, not {type(old).__name__}")
    candidates = open_calls.get(old or None, [])
    if not candidates:
        return old
    new = candidates[0]
    if len(candidates) > 1 or old is None:  # calls that share an id are answered in their order
        candidates.pop(0)
    unnamed = open_calls.get(None, [])
    if new in unnamed:
        unnamed.remove(new)
    return new


def plain(value: Any, what: str, sort: bool = False, depth: int = 0) -> Any:
    """A copy of a JSON value that json.dumps is sure to take: keys are strings.

    sort: put the keys of every object in order. Raises TokenizerError, which names `what`, for
    nesting over MAX_DEPTH and for values that JSON does not have.
    """
    if depth > MAX_DEPTH:
        raise TokenizerError(f"{what} are nested more than {MAX_DEPTH} deep")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TokenizerError(f"{what} hold a number of more than {MAX_BITS} bits")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        members = [(_key(key, what), inner) for key, inner in value.items()]
        if sort:
            members.sort(key=lambda member: member[0])
        return {key: plain(inner, what, sort, depth + 1) for key, inner in members}
    if isinstance(value, list | tuple):
        return [plain(inner, what, sort, depth + 1) for inner in value]
    raise TokenizerError(f"{what} hold a {type(value).__name__}, which JSON does not have")


def _key(key: Any, what: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and key.bit_length() > MAX_BITS:
        raise TokenizerError(f"{what} have a number of more than {MAX_BITS} bits as a key")
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)  # as json.dumps itself spells such keys
    raise TokenizerError(f"{what} have a key of type {type(key).__name__}, not a string")


def plain_tools(tools: Sequence[Tool], sort: bool = False) -> list[dict[str, Any]]:
    """The tool list as plain JSON. Raises TokenizerError where it is no list of objects."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise TokenizerError(f"tools must be a list, not {type(tools).__name__}")
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise TokenizerError(f"a tool must be an object, not {type(tool).__name__}")
        function = tool.get("function")
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if tool.get("type") == "function" and not named:
            raise TokenizerError("a tool of type function needs a 'function' with a 'name'")
    plain_list: list[dict[str, Any]] = plain(tools, "tools", sort)
    return plain_list
