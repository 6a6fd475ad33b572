"""Dialogues as prompts: text for people, token ids for models.

The Kimi line is rendered natively; any other model through the template in its folder. In token
form no text of a message, name, tool or argument becomes a special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kdtree_engine.checkpoints.model_config import names_thinking
from kdtree_engine.checkpoints.reader import present
from kdtree_engine.errors import CheckpointError, ConfigError, TokenizerError, shown
from kdtree_engine.tokenizer import render_kimi
from kdtree_engine.tokenizer.base import CONFIG_FILE, RANKS_FILE, Part, Tokenizer
from kdtree_engine.tokenizer.forgery import template_parts
from kdtree_engine.tokenizer.messages import Message, Tool, refuse_images, rewrite_ids
from kdtree_engine.tokenizer.template import Template
from kdtree_engine.tokenizer.vocabulary import read_object

FAMILIES = tuple(render_kimi.FAMILIES)
TEMPLATE = "template"


def render_chat(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    family: str = "k2.5",
    thinking: bool = True,
    preserve_thinking: bool = False,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt of a dialogue in OpenAI's message form, to the letter of the published template.

    family: one of FAMILIES. thinking: whether the model is to reason before it answers.
    preserve_thinking: keep the reasoning of turns before the running one. Ids of tool calls appear
    as they are (`rewrite_ids` gives them the models' form), images as the template's place for
    one. Names of special tokens inside the messages appear as they are too: to make token ids of
    messages that a user wrote, take `encode_chat`.
    Raises TokenizerError for another family, and for messages and tools of another form.
    """
    options = (thinking, preserve_thinking, add_generation_prompt)
    parts = render_kimi.prompt(messages, tools, _family(family), *options)
    return "".join(text for text, _ in parts)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    family: str = "k2.5",
    thinking: bool = True,
    preserve_thinking: bool = False,
    add_generation_prompt: bool = True,
    images: bool = False,
) -> list[int]:
    """Token ids of the same prompt, where no text inside messages or tools becomes a special token.

    images: give images the template's place for one; by default they are refused, since the engine
    has no vision tower to fill it. Raises TokenizerError as `render_chat`, and where the vocabulary
    lacks a token of the template.
    """
    if not images:
        refuse_images(messages)
    options = (thinking, preserve_thinking, add_generation_prompt)
    return tokenizer.encode_parts(render_kimi.prompt(messages, tools, _family(family), *options))


def _family(name: str) -> render_kimi.Family:
    if name not in render_kimi.FAMILIES:
        raise TokenizerError(
            f"chat family {shown(name)} is not supported; use {', '.join(FAMILIES)}, or open the "
            "model's folder for its own template"
        )
    return render_kimi.FAMILIES[name]


class ChatFormat:
    """How one model writes dialogues. Immutable and thread-safe.

    family: one of FAMILIES, or "template" for the folder's own.
    """

    def __init__(self, family: str, template: Template | None = None) -> None:
        """template: needed by the family "template", unused by others. Raises TokenizerError."""
        self.family = family
        self._template = template
        if family == TEMPLATE:
            assert template is not None, "no template given"
        else:
            _family(family)

    @classmethod
    def from_folder(cls, path: str | Path, family: str | None = None) -> ChatFormat:
        """The format of a model folder: the family given, else the one its files tell.

        Raises TokenizerError where they tell none, or the template is damaged or unsafe.
        """
        folder = Path(path)
        chosen = family if family is not None else detect_family(folder)
        return cls(chosen, Template.from_folder(folder) if chosen == TEMPLATE else None)

    def parts(
        self,
        special_names: Sequence[str],
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        thinking: bool = True,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[Part]:
        """The prompt's parts, special or not. special_names: of the vocabulary's special tokens.

        Raises TokenizerError for images, messages and tools of another form, and for what the
        template itself refuses.
        """
        refuse_images(messages)
        if self._template is None or self.family != TEMPLATE:
            options = (thinking, preserve_thinking, add_generation_prompt)
            named = rewrite_ids(messages)
            return render_kimi.prompt(named, tools, _family(self.family), *options)
        switches = {
            "thinking": thinking,
            "enable_thinking": thinking,
            "preserve_thinking": preserve_thinking,
            "add_generation_prompt": add_generation_prompt,
        }
        return template_parts(self._template, special_names, messages, tools, switches)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        thinking: bool = True,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a dialogue for this model; no text in it becomes a special token.

        For the Kimi families tool calls in the history get the models' own ids (`rewrite_ids`).
        Raises TokenizerError as `parts`.
        """
        options = (thinking, preserve_thinking, add_generation_prompt)
        names = list(tokenizer.special_ids)
        return tokenizer.encode_parts(self.parts(names, messages, tools, *options))


def starts_in_reasoning(prompt: str) -> bool:
    """Whether an answer to this prompt begins inside the reasoning, which the prompt has opened."""
    return prompt.rstrip().endswith("<think>")


def detect_family(folder: Path) -> str:
    """The chat family that a model folder's files tell. Raises TokenizerError if none."""
    kind = read_object(folder / "config.json", needed=False).get("model_type")
    if kind == "kimi_k25":
        return "k2.5"
    if kind == "kimi_k2":
        return "k2-thinking" if _names_thinking(folder) else "k2"
    if Template.in_folder(folder):
        return TEMPLATE
    if present(folder / RANKS_FILE):
        return "k2.5"  # a Kimi vocabulary beside another model_type: a model made for tests
    raise TokenizerError(
        f"{folder} has no chat template (chat_template.jinja, or 'chat_template' in "
        f"{CONFIG_FILE}), and its model_type {shown(kind)} has none built in"
    )


def _names_thinking(folder: Path) -> bool:
    try:
        return names_thinking(folder)
    except (ConfigError, CheckpointError) as error:
        raise TokenizerError(str(error)) from error
