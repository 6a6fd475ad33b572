"""Errors that a user can cause.

Each message is one line that says what was found, what was expected and what to do. The command
prints it without a traceback and exits with a code other than 0. A broken invariant inside the
engine is an assertion instead, never one of these.
"""

from __future__ import annotations

LONGEST = 1000
"""Characters of a message at most: names and values in it may come from a stranger's file."""


class KDTreeError(Exception):
    """Base of every error whose cause lies outside the engine.

    Its message is one line of at most LONGEST characters, whatever the names and values in it hold:
    line breaks become spaces, what cannot be printed is escaped, the middle may be left out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class CheckpointError(KDTreeError):
    """A model folder is missing, damaged, or holds other tensors than its config promises."""


class ConfigError(KDTreeError):
    """A configuration lacks a key, or describes a model that the engine does not support."""


class TokenizerError(KDTreeError):
    """A vocabulary is missing or damaged, or a token id or message cannot be translated."""


class OptionError(KDTreeError):
    """An option given by the user is out of range or contradicts another."""


class DrafterError(KDTreeError):
    """A drafter does not fit the target model."""


class CapacityError(KDTreeError):
    """A request needs more room (cache pages, positions) than the engine was given."""


def shown(value: object, limit: int = 60) -> str:
    """A value as Python writes it, the first `limit` characters of that, for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of over 4,300 digits; lists in lists in lists
        text = f"a {type(value).__name__} too large to print"
    return _one_line(text)[:limit]


def _one_line(text: str) -> str:
    if len(text) > LONGEST:
        half = (LONGEST - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    if text.isprintable():
        return text
    line = "".join(_printable(one) for one in text)
    return line if len(line) <= LONGEST else _one_line(line)


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()
