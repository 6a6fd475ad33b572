"""Dialogues as the prompts that K2.5 and K2.6 were trained on.

A turn is ROLE_TOKEN name <|im_middle|> body <|im_end|>, with nothing between turns. The rules are
those of the models' published template; tests compare with its output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from kdtree_engine.errors import TokenizerError
from kdtree_engine.tokenizer import typescript
from kdtree_engine.tokenizer.vocabulary import Tokenizer

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
# A piece of prompt and whether it is a special token's name (True) or ordinary text.
Part = tuple[str, bool]

FAMILIES = ("k2.5", "k2.6")
ROLE_TOKENS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
OTHER_ROLES = "<|im_system|>"  # system, tool and whatever else
MIDDLE: Part = ("<|im_middle|>", True)
END: Part = ("<|im_end|>", True)
THINK: Part = ("<think>", True)
END_THINK: Part = ("</think>", True)


def render_chat(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    family: str = "k2.5",
    thinking: bool = True,
    preserve_thinking: bool = False,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt of a dialogue in OpenAI's message form.

    thinking: whether the model is to reason before it answers. preserve_thinking: keep the
    reasoning of turns before the running one. Names of special tokens inside the messages appear
    as they are: to make token ids of messages that a user wrote, take `encode_chat`.
    Raises TokenizerError for another family, images, and tool schemas not supported yet.
    """
    options = (family, thinking, preserve_thinking, add_generation_prompt)
    return "".join(text for text, _ in _prompt(messages, tools, *options))


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    family: str = "k2.5",
    thinking: bool = True,
    preserve_thinking: bool = False,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of the same prompt, where no text inside messages or tools becomes a special token.

    Raises TokenizerError as `render_chat`, and where the vocabulary lacks a token of the template.
    """
    options = (family, thinking, preserve_thinking, add_generation_prompt)
    ids: list[int] = []
    for special, run in groupby(_prompt(messages, tools, *options), key=lambda part: part[1]):
        texts = [text for text, _ in run]
        if not special:
            ids += tokenizer.encode("".join(texts))
            continue
        for name in texts:
            if name not in tokenizer.special_ids:
                raise TokenizerError(f"the vocabulary has no token {name}, which the chat needs")
            ids.append(tokenizer.special_ids[name])
    return ids


def _prompt(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    family: str,
    thinking: bool,
    preserve_thinking: bool,
    add_generation_prompt: bool,
) -> list[Part]:
    if family not in FAMILIES:
        raise TokenizerError(
            f"chat family {family!r} is not supported; use {' or '.join(FAMILIES)}"
        )
    parts: list[Part] = []
    if tools:
        parts += _turn(OTHER_ROLES, "tool_declare", [(_declaration(tools), False)])
    settled = 0 if preserve_thinking else _settled(messages)
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise TokenizerError(f"message {index} has no role")
        body = _body(message, role, show_thinking=thinking and index >= settled)
        token = ROLE_TOKENS.get(role, OTHER_ROLES)
        parts += _turn(token, message.get("name") or role, body)
    if add_generation_prompt:
        parts += [(ROLE_TOKENS["assistant"], True), ("assistant", False), MIDDLE, THINK]
        parts += [] if thinking else [END_THINK]
    return parts


def _turn(token: str, name: str, body: list[Part]) -> list[Part]:
    return [(token, True), (name, False), MIDDLE, *body, END]


def _settled(messages: Sequence[Message]) -> int:
    """How many messages lie up to the last answer without tool calls, that one included.

    What follows is the running tool loop, the only place where reasoning stays visible.
    """
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.get("role") == "assistant" and not message.get("tool_calls"):
            return index + 1
    return 0


def _body(message: Message, role: str, show_thinking: bool) -> list[Part]:
    content: Part = (_text(message.get("content")), False)
    if role == "tool":
        heading = f"## Return of {message.get('tool_call_id', '')}\n"
        return [(heading, False), content]
    if role != "assistant":
        return [content]
    reasoning = (message.get("reasoning_content") or "") if show_thinking else ""
    body = [THINK, (reasoning, False), END_THINK, content]
    calls = message.get("tool_calls")
    if calls:
        body.append(("<|tool_calls_section_begin|>", True))
        for call in calls:
            body += _call(call)
        body.append(("<|tool_calls_section_end|>", True))
    return body


def _call(call: Mapping[str, Any]) -> list[Part]:
    function, name = call.get("function"), call.get("id")
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise TokenizerError("a tool call in a message needs an 'id' and a 'function'")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return [
        ("<|tool_call_begin|>", True),
        (name, False),
        ("<|tool_call_argument_begin|>", True),
        (arguments, False),
        ("<|tool_call_end|>", True),
    ]


def _text(content: Any) -> str:
    """A message's content: a string, nothing, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TokenizerError(
            f"message content must be text or a list, not {type(content).__name__}"
        )
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise TokenizerError(f"message content of type {kind!r} is not supported, only text")
        texts.append(part["text"])
    return "".join(texts)


def _declaration(tools: Sequence[Tool]) -> str:
    text = typescript.declare(tools)
    if text is not None:
        return text
    return json.dumps(list(tools), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
