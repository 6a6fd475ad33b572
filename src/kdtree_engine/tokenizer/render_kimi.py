"""Dialogues as the prompts that the Kimi K2 line was trained on.

A turn is ROLE_TOKEN name <|im_middle|> body <|im_end|>, with nothing between turns. The rules are
those of the models' published templates (docs/prompts.md); tests compare with their output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdtree_engine.errors import TokenizerError
from kdtree_engine.tokenizer import typescript
from kdtree_engine.tokenizer.base import Part
from kdtree_engine.tokenizer.messages import (
    Message,
    Tool,
    arguments_of,
    calls_of,
    plain_tools,
    reasoning_of,
    role_of,
    texts_of,
)

ROLE_TOKENS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
OTHER_ROLES = "<|im_system|>"  # system, tool and whatever else
MIDDLE: Part = ("<|im_middle|>", True)
END: Part = ("<|im_end|>", True)
THINK: Part = ("<think>", True)
END_THINK: Part = ("</think>", True)
IMAGE: list[Part] = [
    ("<|media_begin|>", True),
    ("image", False),
    ("<|media_content|>", True),
    ("<|media_pad|>", True),
    ("<|media_end|>", True),
    ("\n", False),
]


@dataclass(frozen=True)
class Family:
    """Where the models of the line differ.

    system: the system message of a dialogue that begins without one. reasons: whether assistants'
    turns have a place for reasoning. opens: whether the prompt itself opens the reasoning.
    typescript: whether tools are declared in the TypeScript form.
    """

    system: str | None
    reasons: bool
    opens: bool
    typescript: bool


_K25 = Family(system=None, reasons=True, opens=True, typescript=True)
FAMILIES = {
    "k2": Family("You are a helpful assistant", reasons=False, opens=False, typescript=False),
    "k2-thinking": Family(
        "You are Kimi, an AI assistant created by Moonshot AI.",
        reasons=True,
        opens=False,
        typescript=False,
    ),
    "k2.5": _K25,
    "k2.6": _K25,
}


def prompt(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    family: Family,
    thinking: bool,
    preserve_thinking: bool,
    add_generation_prompt: bool,
) -> list[Part]:
    """The parts of a dialogue's prompt. Raises TokenizerError for messages of another form."""
    roles = [role_of(index, message) for index, message in enumerate(messages)]
    parts: list[Part] = []
    if tools:
        parts += _turn(OTHER_ROLES, "tool_declare", [(_declaration(tools, family), False)])
    if family.system is not None and roles and roles[0] != "system":
        parts += _turn(OTHER_ROLES, "system", [(family.system, False)])
    settled = 0 if preserve_thinking else _settled(messages)
    for index, (role, message) in enumerate(zip(roles, messages, strict=True)):
        body = _body(message, role, family, show_thinking=thinking and index >= settled)
        name = message.get("name") or role
        if not isinstance(name, str):
            raise TokenizerError(f"the name in message {index} must be text")
        parts += _turn(ROLE_TOKENS.get(role, OTHER_ROLES), name, body)
    if add_generation_prompt:
        parts += [(ROLE_TOKENS["assistant"], True), ("assistant", False), MIDDLE]
        parts += _opening(family, thinking)
    return parts


def _opening(family: Family, thinking: bool) -> list[Part]:
    """What of the answer the prompt already says."""
    if not family.reasons:
        return []
    if thinking:
        return [THINK] if family.opens else []
    return [THINK, END_THINK]


def _turn(token: str, name: str, body: list[Part]) -> list[Part]:
    return [(token, True), (name, False), MIDDLE, *body, END]


def _settled(messages: Sequence[Message]) -> int:
    """How many messages lie up to the last answer without tool calls, that one included.

    What follows is the running tool loop, the only place where reasoning stays visible.
    """
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message["role"] == "assistant" and not message.get("tool_calls"):
            return index + 1
    return 0


def _body(message: Message, role: str, family: Family, show_thinking: bool) -> list[Part]:
    content: list[Part] = []
    for text in texts_of(message.get("content")):
        content += IMAGE if text is None else [(text, False)]
    if role == "tool":
        return [(f"## Return of {_result_id(message)}\n", False), *content]
    if role != "assistant":
        return content
    reasoning = reasoning_of(message)
    body: list[Part] = []
    if family.reasons:
        body = [THINK, (reasoning if show_thinking else "", False), END_THINK]
    body += content
    calls = calls_of(message)
    if calls:
        body.append(("<|tool_calls_section_begin|>", True))
        for call in calls:
            body += _call(call)
        body.append(("<|tool_calls_section_end|>", True))
    return body


def _result_id(message: Message) -> str:
    name = message.get("tool_call_id")
    if name is not None and not isinstance(name, str):
        raise TokenizerError(f"'tool_call_id' must be text, not {type(name).__name__}")
    return name or ""


def _call(call: Mapping[str, Any]) -> list[Part]:
    if not isinstance(call.get("id"), str):
        raise TokenizerError("a tool call in a message needs an 'id' and a 'function'")
    return [
        ("<|tool_call_begin|>", True),
        (call["id"], False),
        ("<|tool_call_argument_begin|>", True),
        (arguments_of(call), False),
        ("<|tool_call_end|>", True),
    ]


def _declaration(tools: Sequence[Tool], family: Family) -> str:
    listed = plain_tools(tools, sort=True)
    if not family.typescript:
        return json.dumps(listed, ensure_ascii=False)
    text = typescript.declare(listed)
    if text is not None:
        return text
    return json.dumps(listed, ensure_ascii=False, separators=(",", ":"))
