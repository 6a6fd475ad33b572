"""Names such as `moonshotai/Kimi-K2.6`, found among what Hugging Face's tools have downloaded.

Nothing is ever fetched. A download of ORG/NAME lies in `models--ORG--NAME` of the cache:
`refs/REVISION` holds a commit, `snapshots/COMMIT` links to the files, and `blobs` holds these. A
link is made when its file is there as a whole, so the snapshot alone tells what is there: a
download that was killed leaves an `*.incomplete` file, which later ones neither use nor remove.
"""

from __future__ import annotations

import os
import re
from os import PathLike
from pathlib import Path
from shlex import quote

from kdtree_engine.checkpoints.model_config import CONFIG_FILE
from kdtree_engine.checkpoints.reader import (
    INDEX_FILE,
    PICKLES,
    SINGLE_FILE,
    few,
    missing_shards,
    read_weight_map,
)
from kdtree_engine.env import hub_cache
from kdtree_engine.errors import CheckpointError

_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"  # the hub's longest names have 96 characters
_LONGEST = 1000
_PART = r"[^\x00-\x20\x7f~^:?*\[\\/.][^\x00-\x20\x7f~^:?*\[\\/]*"  # of a branch's name
_NAME = re.compile(
    r"(?:https?://(?:huggingface\.co|hf\.co)/)?"
    rf"({_WORD}/{_WORD})(?:(?:@|/tree/)({_PART}(?:/{_PART})*))?/?"
)


def find_folder(name: str | PathLike[str], cache: Path | None = None) -> Path:
    """The folder that `name` stands for: itself if there is one, else a download.

    `name` may be ORG/NAME or ORG/NAME@REVISION (a branch, tag or commit; `main` without one), or
    the model's address on the Hub, looked for in `cache`, by default the one of the environment.
    What does not look like such a name is returned as it is, for the reader to judge.
    CheckpointError for one that is not there, or not there as a whole, and for an empty name, which
    would be the folder that one stands in.
    """
    text = os.fsdecode(name)
    if not text:
        raise CheckpointError("the name of a model or drafter is empty: give a folder or ORG/NAME")
    path = Path(text)
    match = _NAME.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None or path.exists():
        return path
    home = hub_cache() if cache is None else cache
    return _snapshot(match[1], match[2], home)


def _snapshot(name: str, revision: str | None, cache: Path) -> Path:
    """The snapshot of ORG/NAME in `cache`."""
    fetch = f"hf download {name}" + (f" --revision {quote(revision)}" if revision else "")
    home = cache / f"models--{name.replace('/', '--')}"
    if not home.is_dir():
        raise CheckpointError(
            f"{name}: there is no such folder here, and no download of it ({home}); get it with: "
            f"{fetch}"
        )
    wanted = revision or "main"
    reference = home / "refs" / wanted
    try:
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{reference}: cannot be read ({error})") from error
    folder = home / "snapshots" / commit
    if not re.fullmatch(_WORD, commit) or not folder.is_dir():
        there = [path.name for path in sorted((home / "snapshots").glob("*")) if path.is_dir()]
        also = f"it has {few([f'{name}@{one}' for one in there])}; " if there else ""
        raise CheckpointError(
            f"{name}: its download ({home}) has no revision {wanted}; {also}get it with: {fetch}"
        )
    _check_whole(name, home, folder, fetch)
    return folder


def _check_whole(name: str, home: Path, folder: Path, fetch: str) -> None:
    """CheckpointError if files that a model folder needs are not in the snapshot."""
    names = {path.name for path in folder.iterdir()}
    found = [] if CONFIG_FILE in names else [f"{CONFIG_FILE} is missing"]
    weights = {SINGLE_FILE, INDEX_FILE} & names
    if not weights and not any(name.endswith(PICKLES) for name in names):
        found.append(f"neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    absent = ""
    if (folder / INDEX_FILE).exists():
        absent = missing_shards(folder, read_weight_map(folder))
        found += [absent] if absent else []
    lost = sorted(path.name for path in folder.iterdir() if not path.exists())
    if lost and not absent:
        found.append(f"links lead nowhere: {few(lost)}")
    partial = len(list((home / "blobs").glob("*.incomplete")))
    if found and partial:
        found.append(f"downloads that run or were cut off left {partial} .incomplete in blobs")
    if found:
        raise CheckpointError(
            f"{name}: the download in {folder} is not whole ({'; '.join(found)}); finish it with: "
            f"{fetch}"
        )
