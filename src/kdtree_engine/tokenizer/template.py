"""The chat template of a model folder, run in a sandbox with bounded work (sandbox.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from kdtree_engine.checkpoints.model_config import TEMPLATE_FILE, TEMPLATE_JSON
from kdtree_engine.checkpoints.reader import present
from kdtree_engine.errors import TokenizerError
from kdtree_engine.tokenizer.base import CONFIG_FILE
from kdtree_engine.tokenizer.budget import MAX_EMITTED, rendering
from kdtree_engine.tokenizer.sandbox import Planter, Sandbox
from kdtree_engine.tokenizer.vocabulary import read_file, read_object

MAX_SOURCE = 200_000  # characters
# What templates know by name, from tokenizer_config.json.
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# What a wrong or hostile template can raise: jinja's own errors, and Python's from expressions.
FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    MemoryError,
    SyntaxError,
    TypeError,
    ValueError,
)


class Template:
    """One or two compiled templates (with and without tools). Immutable and thread-safe."""

    def __init__(self, source: str, tool_source: str | None = None, **tokens: str) -> None:
        """tool_source: used instead where tools are given. tokens: bos_token and the like.

        Raises TokenizerError where a template is too long or does not compile.
        """
        self._plain = _compile(source)
        self._tools = None if tool_source is None else _compile(tool_source)
        self.tokens = tokens
        self.source = source + (tool_source or "")

    @classmethod
    def from_folder(cls, folder: Path) -> Template:
        """Read chat_template.jinja, chat_template.json or tokenizer_config.json.

        Raises TokenizerError, which names the file, where there is none or it is damaged.
        """
        sources = _sources(folder)
        if not sources:
            raise TokenizerError(f"{folder} has no chat template")
        first = next(iter(sources.values()))
        config = read_object(folder / CONFIG_FILE, needed=False)
        tokens = {key: _token(config.get(key)) for key in TOKENS if config.get(key) is not None}
        try:
            return cls(sources.get("default", first), sources.get("tool_use"), **tokens)
        except TokenizerError as error:
            raise TokenizerError(f"{folder}: {error}") from error

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Whether a folder has a chat template."""
        return bool(_sources(folder))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt's text. Raises TokenizerError for whatever goes wrong in the template."""
        template = (
            self._tools if self._tools is not None and variables.get("tools") else self._plain
        )
        try:
            with rendering():
                pieces, size = [], 0
                for piece in template.generate({**self.tokens, **variables}):
                    size += len(piece)
                    if size > MAX_EMITTED:
                        raise TokenizerError(
                            f"the chat template writes over {MAX_EMITTED} characters"
                        )
                    pieces.append(piece)
                return "".join(pieces)
        except FAULTS as error:
            raise TokenizerError(f"the chat template fails: {_reason(error)}") from error


def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise TokenizerError(f"the chat template has {len(source)} characters, over {MAX_SOURCE}")
    try:
        sandbox = Sandbox()
        return sandbox.from_string(Planter().visit(sandbox.parse(source)))
    except FAULTS as error:
        raise TokenizerError(f"the chat template does not compile: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.300}" + (f" (line {line})" if line else "")


def _sources(folder: Path) -> dict[str, str]:
    """Template texts by name, "default" being the ordinary one."""
    if present(folder / TEMPLATE_FILE):
        try:
            return {"default": read_file(folder / TEMPLATE_FILE).decode()}
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{folder / TEMPLATE_FILE} is not UTF-8: {error}") from error
    for name in (TEMPLATE_JSON, CONFIG_FILE):
        value = read_object(folder / name, needed=False).get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list) and value:
            return dict(_named(folder / name, entry) for entry in value)
        if value:
            raise TokenizerError(f"{folder / name}: 'chat_template' is neither text nor a list")
    return {}


def _named(path: Path, entry: Any) -> tuple[str, str]:
    name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (0, 0)
    if not isinstance(name, str) or not isinstance(text, str):
        raise TokenizerError(f"{path}: an entry of 'chat_template' lacks 'name' or 'template'")
    return name, text


def _token(value: Any) -> str:
    """A token's name: text, or an object with its 'content'."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else ""
