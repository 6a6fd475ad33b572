"""What callers hand over, of any library's types, as Python's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from numbers import Integral, Real
from typing import cast

import numpy as np
import torch
from torch import Tensor

from kdtree_engine.errors import OptionError, shown

Prompt = str | Sequence[int]

MOST_ENTRIES = 1 << 22
"""Of a prompt, or of a list of prompts: as many as a model may have positions."""

MOST_BITS = 1000
"""Of a whole number: what still is a float, and what Python still prints."""


def as_batch(prompts: object) -> list[Prompt]:
    """One prompt or several: a text and a list of ids are one. Raises OptionError."""
    if isinstance(prompts, str):
        return [prompts]
    items = _listed(prompts)
    ids = sum(isinstance(item, Integral) for item in items)
    if ids and ids < len(items):
        raise OptionError("prompts mix token ids with texts or lists; give one prompt or a list")
    return [cast(Sequence[int], items)] if ids else cast(list[Prompt], items)


def as_token_ids(prompt: object) -> list[int]:
    """A prompt that is no text. Raises OptionError where it does not hold whole numbers alone."""
    ids = _listed(prompt)
    for one in ids:
        if not isinstance(one, Integral) or isinstance(one, bool):
            raise OptionError(f"prompt token {shown(one)} is not an integer")
    return [int(cast(int, one)) for one in ids]


def _listed(prompts: object) -> list[object]:
    """A list, a range, an array or a tensor as a list."""
    given = untensored(prompts)
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray | memoryview):
        raise OptionError(
            f"prompts must be a text, token ids or a list of these, not {shown(given)}"
        )
    items = list(islice(given, MOST_ENTRIES + 1))
    if len(items) > MOST_ENTRIES:
        raise OptionError(f"a prompt, or a list of them, has over {MOST_ENTRIES} entries")
    return items


def untensored(value: object) -> object:
    """Arrays and tensors as lists (as numbers without a dimension), anything else as it is."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        return value.tolist()
    return value


def entries(name: str, value: object, most: int, wanted: str) -> tuple[object, ...]:
    """The entries of any iterable that is no text. OptionError where there are over `most`, or
    none can be had; `wanted` is what it says was expected.
    """
    given = untensored(value)
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | bytearray | Mapping):
        raise OptionError(f"{name} {shown(given, 80)} must be {wanted}")
    found = tuple(islice(given, most + 1))
    if len(found) > most:
        raise OptionError(f"{name} has over {most} entries")
    return found


def whole(
    name: str, value: object, least: int | None = None, most: int | None = None, also: str = ""
) -> int:
    """Any library's whole number as Python's, from `least` to `most`. Raises OptionError.

    also: what else the caller takes, for the message.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise OptionError(f"{name} {shown(value)} must be an integer{also}")
    number = int(value)
    if number.bit_length() > MOST_BITS:
        raise OptionError(f"{name} is a number of {number.bit_length()} bits; at most {MOST_BITS}")
    if least is not None and number < least:
        raise OptionError(f"{name} {number} must be {least} or more")
    if most is not None and number > most:
        raise OptionError(f"{name} {number} must be at most {most}")
    return number


def real(name: str, value: object, also: str = "") -> float:
    """Any library's number as a float, perhaps not a finite one. Raises OptionError."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise OptionError(f"{name} {shown(value)} must be a number{also}")
    try:
        return float(value)
    except OverflowError as error:
        raise OptionError(f"{name} {shown(value)} is too large a number") from error


def truth(name: str, value: object) -> bool:
    """True or False. Raises OptionError for anything else, numbers too."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} {shown(value)} must be True or False")
    return value
