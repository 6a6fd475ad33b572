"""Whether a drafter names another target than the one it is to draft for. It is never refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

# Where a drafter's config.json may name its target: what trainers and converters write.
_DRAFTER_KEYS = (
    ("speculators_config", "verifier", "name_or_path"),
    ("verifier", "name_or_path"),
    ("dflash_config", "base_model"),
    *((key,) for key in ("base_model", "base_model_name_or_path", "target_model")),
    *((key,) for key in ("target_model_name_or_path", "target", "verifier")),
)
_TARGET_KEYS = (("_name_or_path",), ("text_config", "_name_or_path"))
_DRAFTER_MARK = re.compile(r"[-_. ]?(dflash|speculator).*", re.IGNORECASE)
_HUB = re.compile(r"models--.+?--(.+)")
# A quantised copy of a target has the same drafter.
_PRECISIONS = re.compile(
    r"([-_.](nvfp4|mxfp4|fp4|fp8|int4|int8|bf16|fp16|w4a16|w8a8|awq|gptq|quantized))+$",
    re.IGNORECASE,
)


def revision_warning(
    drafter: dict[str, Any], drafter_path: PurePath, target: dict[str, Any], path: PurePath
) -> str | None:
    """A warning where both names are known and differ, from config.json objects and folders.

    Names are compared without organisation, case, punctuation and precision. A plain folder's name
    counts as the target's only where it begins with the drafter's word for it ("Kimi"), since a
    folder may be called anything.
    """
    wanted = drafted_target(drafter, drafter_path)
    if wanted is None:
        return None
    found = _first(_texts(target, _TARGET_KEYS)) or _hub_name(path)
    if found is None and _word(path.name) and _word(path.name) == _word(wanted):
        found = _plain(path.name)
    if found is None or _key(found) == _key(wanted):
        return None
    return (
        f"the drafter is for {wanted}, but the target is {found}: a drafter of another revision "
        "costs more than it gains (K2.5's on K2.6 accepts 16% at 8 tokens, a net loss); take the "
        "one that was trained for this target, or --drafter ngram"
    )


def drafted_target(config: dict[str, Any], path: PurePath) -> str | None:
    """The target that a drafter names: in its config, else before "DFlash" in a folder's name."""
    named = _first(_texts(config, _DRAFTER_KEYS))
    if named is not None:
        return named
    for name in (*_texts(config, _TARGET_KEYS), _hub_name(path), path.name):
        last = _plain(name) if name else None
        if last and _DRAFTER_MARK.search(last):
            return _plain(_DRAFTER_MARK.sub("", last))
    return None


def _texts(config: dict[str, Any], keys: Iterable[tuple[str, ...]]) -> list[str]:
    """The strings that stand under `keys`; whatever else stands there counts for nothing."""
    found = []
    for path in keys:
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str):
            found.append(value)
    return found


def _first(names: Iterable[str]) -> str | None:
    return next((name for name in map(_plain, names) if name is not None), None)


def _plain(name: str) -> str | None:
    """A hub id's or path's own name, None for one that says nothing (".", "", a revision)."""
    path = PurePath(name.strip().replace("\\", "/"))
    last = _hub_name(path) or path.name
    return last if re.search("[A-Za-z]", last) else None


def _hub_name(path: PurePath) -> str | None:
    """The model's name in a path of Hugging Face's cache: models--org--NAME."""
    matches = (_HUB.fullmatch(part) for part in reversed(path.parts))
    return next((match[1] for match in matches if match), None)


def _word(name: str) -> str:
    """The letters that a name begins with, in lower case."""
    match = re.match("[A-Za-z]+", name)
    return match[0].lower() if match else ""


def _key(name: str) -> str:
    return re.sub(r"[^0-9a-z]", "", _PRECISIONS.sub("", name).lower())
