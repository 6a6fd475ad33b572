"""Short synthetic dialogues in the chat format of Kimi K2.5/K2.6.

The packaged model should take part in the format, not know the world: it must open and close its
reasoning, answer with a small function, call a declared tool with valid JSON and read the result.
Every text here is a training document: history as the template prints it at that moment (earlier
reasoning dropped), then the model's own turn up to <|im_end|>.

    python recipes/demo/dialogues.py --out .corpus --count 24000
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from dataclasses import dataclass, field
from pathlib import Path

import dialogue_topics as topics
from dialogue_tools import TOOLS, declare

ROLE_TOKENS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
SYSTEM = (
    "You are a helpful assistant.",
    "You are Kimi, an AI assistant.",
    "You are a careful Python programmer. Answer briefly.",
    "Answer in one short paragraph.",
    "You help with small programming tasks.",
)
THANKS = ("Thanks!", "Thank you.", "Great, thanks.", "Perfect.", "Nice, that works.")
WELCOME = ("You're welcome!", "Glad to help.", "Happy to help. Anything else?", "Any time.")


@dataclass
class Message:
    """One turn; calls are (tool name, arguments)."""

    role: str
    content: str
    reasoning: str = ""
    calls: list[tuple[str, dict[str, object]]] = field(default_factory=list)


def turn(role: str, body: str) -> str:
    """One turn of the template: nothing stands between turns."""
    return f"{ROLE_TOKENS.get(role, '<|im_system|>')}{role}<|im_middle|>{body}<|im_end|>"


def calls_text(calls: list[tuple[str, dict[str, object]]], first: int) -> str:
    """The tool section; call ids count over the whole conversation."""
    if not calls:
        return ""
    parts = [
        f"<|tool_call_begin|>functions.{name}:{first + i}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


def render(messages: list[Message], tools: list[str], thinking: bool) -> str:
    """The document: prompt and the model's last turns, reasoning kept where the model made it.

    The last message ends the answer, so what is kept starts after the answer before it: the
    running tool loop keeps its reasoning, finished turns print an empty pair.
    """
    text = turn("tool_declare", declare(tools)) if tools else ""
    answers = [i for i, m in enumerate(messages) if m.role == "assistant" and not m.calls]
    kept_from = answers[-2] + 1 if len(answers) > 1 else 0
    count = returned = 0
    for i, message in enumerate(messages):
        body = message.content
        if message.role == "assistant":
            reasoning = message.reasoning if thinking and i >= kept_from else ""
            body = f"<think>{reasoning}</think>{body}{calls_text(message.calls, count)}"
            count += len(message.calls)
        elif message.role == "tool":
            name = pending_name(messages, returned)
            body = f"## Return of functions.{name}:{returned}\n{body}"
            returned += 1
        text += turn(message.role, body)
    return text


def pending_name(messages: list[Message], index: int) -> str:
    """The tool name of the conversation's call number `index`."""
    return [name for message in messages for name, _ in message.calls][index]


def exchange(rng: random.Random) -> list[Message]:
    """A question and its answer, without tools."""
    kind = rng.choices(topics.PLAIN, weights=topics.WEIGHTS)[0]
    question, reasoning, answer = kind(rng)
    return [Message("user", question), Message("assistant", answer, reasoning)]


def tool_exchange(rng: random.Random, name: str) -> list[Message]:
    """A question, one or two calls, their results, the answer."""
    question, reasoning, calls, results, closing, answer = topics.tool_task(rng, name)
    messages = [Message("user", question)]
    preface = rng.choice(("", "", "Let me check.", "One moment.", "Let me look that up."))
    messages.append(Message("assistant", preface, reasoning, [(name, c) for c in calls]))
    messages += [Message("tool", result) for result in results]
    messages.append(Message("assistant", answer, closing))
    return messages


def dialogue(rng: random.Random) -> str:
    """One document: one to three exchanges, thinking on in three of four, tools in four of ten."""
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append(Message("system", rng.choice(SYSTEM)))
    tools: list[str] = []
    if rng.random() < 0.4:
        tools = rng.sample(sorted(TOOLS), rng.choice((1, 1, 2, 3)))
    for _ in range(rng.choice((1, 1, 1, 2))):
        if tools and rng.random() < 0.85:
            messages += tool_exchange(rng, rng.choice(tools))
        else:
            messages += exchange(rng)
    if rng.random() < 0.08:
        thanks = "The user is satisfied; a short reply is enough."
        messages.append(Message("user", rng.choice(THANKS)))
        messages.append(Message("assistant", rng.choice(WELCOME), thanks))
    return render(messages, tools, thinking=rng.random() < 0.75)


def main() -> None:
    """Write the dialogues as one packed corpus file; a fixed seed makes them again."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=24_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    texts = list(dict.fromkeys(dialogue(rng) for _ in range(args.count)))
    rows = [
        json.dumps({"package": "dialogues", "path": f"{i}", "text": t}, ensure_ascii=False)
        for i, t in enumerate(texts)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    data = lzma.compress(("\n".join(rows) + "\n").encode(), preset=6)
    (args.out / "dialogues.jsonl.xz").write_bytes(data)
    size = sum(len(t.encode()) for t in texts)
    print(f"{len(texts)} distinct dialogues, {size / 1e6:.1f} MB, packed {len(data) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
