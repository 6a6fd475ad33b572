"""Whether a drafter names another target than the one it is to draft for. It is never refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
    r"([-_. ](bf16|(nv|mx)?fp\d+|int\d+|w\d+a\d+|gs?\d+|\d+bit|awq|gptq|quantized|dynamic|static"
    r"|block|channel))+$",
    re.IGNORECASE,
)


def revision_warning(
    drafter: dict[str, Any],
    drafter_path: PurePath,
    target: dict[str, Any],
    paths: Sequence[PurePath],
) -> str | None:
    """A warning where two revisions of one model are named, from config.json objects and folders.

    paths: the target's folder, as given and resolved. Names are compared without organisation,
    case, punctuation and precision; "K2.6" is enough for "Kimi-K2.6". A name says something only if
    it has a digit, and two are of one model only if they begin with the same word: folders and
    checkpoints of a training run may be called anything.
    """
    wanted = drafted_target(drafter, drafter_path)
    if wanted is None:
        return None
    for name in (
        *filter(None, map(_hub_name, paths)),
        *_texts(target, _TARGET_KEYS),
        *(path.name for path in paths),
    ):
        found = _versioned(name)
        if found is None:
            continue
        keys = _key(wanted), _key(found)
        if keys[0].endswith(keys[1]) or keys[1].endswith(keys[0]):
            return None
        if _word(found) == _word(wanted) != "":
            return (
                f"the drafter is for {wanted}, but the target is {found}: a drafter of another "
                "revision costs more than it gains (K2.5's on K2.6 accepts 16% at 8 tokens, a net "
                "loss); take the one that was trained for this target, or --drafter ngram"
            )
    return None


def drafted_target(config: dict[str, Any], path: PurePath) -> str | None:
    """The target that a drafter names: in its config, else before "DFlash" in a folder's name."""
    for name in _texts(config, _DRAFTER_KEYS):
        if named := _versioned(name):
            return named
    for name in (*_texts(config, _TARGET_KEYS), _hub_name(path) or "", path.name):
        last = _plain(name)
        if _DRAFTER_MARK.search(last) and (named := _versioned(_DRAFTER_MARK.sub("", last))):
            return named
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


def _versioned(name: str) -> str | None:
    """A hub id's or path's own name, None where it tells no version: no digit besides precision."""
    last = _plain(name)
    return last if re.search("[0-9]", _key(last)) and re.search("[A-Za-z]", last) else None


def _plain(name: str) -> str:
    """The last part of a hub id or path, without a revision behind it."""
    path = PurePath(name.strip().replace("\\", "/"))
    return (_hub_name(path) or path.name).partition("@")[0]


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
