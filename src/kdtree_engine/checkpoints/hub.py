"""Names such as `moonshotai/Kimi-K2.6`, found among what Hugging Face's tools have downloaded.

Nothing is ever fetched. A download of ORG/NAME lies in `models--ORG--NAME` of the cache:
`refs/REVISION` holds a commit, `snapshots/COMMIT` links to the files, and `blobs` holds these, each
one called `*.incomplete` until it is there as a whole.
"""

from __future__ import annotations

import os
import re
from os import PathLike
from pathlib import Path

from kdtree_engine.checkpoints.reader import INDEX_FILE, few, missing_shards, read_weight_map
from kdtree_engine.env import hub_cache
from kdtree_engine.errors import CheckpointError

_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"  # the hub's longest names have 96 characters
_LONGEST = 1000
_NAME = re.compile(rf"({_WORD}/{_WORD})(?:@({_WORD}(?:/{_WORD})*))?")


def find_folder(name: str | PathLike[str], cache: Path | None = None) -> Path:
    """The folder that `name` stands for: itself if there is one, else a download.

    `name` may be ORG/NAME or ORG/NAME@REVISION (a branch, tag or commit; `main` without one),
    looked for in `cache`, by default the one of the environment. What does not look like such a
    name is returned as it is, for the reader to judge. CheckpointError for one that is not there,
    or not there as a whole.
    """
    text = os.fsdecode(name)
    path = Path(text)
    match = _NAME.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None or path.exists():
        return path
    home = hub_cache() if cache is None else cache
    return _snapshot(match[1], match[2], home)


def _snapshot(name: str, revision: str | None, cache: Path) -> Path:
    """The snapshot of ORG/NAME in `cache`."""
    fetch = f"hf download {name}" + (f" --revision {revision}" if revision else "")
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
    """CheckpointError if the download has not ended, or files of the snapshot are lost."""
    found = []
    absent = ""
    if (folder / INDEX_FILE).exists():
        absent = missing_shards(folder, read_weight_map(folder))
        found += [absent] if absent else []
    lost = sorted(path.name for path in folder.iterdir() if not path.exists())
    if lost and not absent:
        found.append(f"links lead nowhere: {few(lost)}")
    blobs = home / "blobs"
    partial = [path.name for path in blobs.glob("*.incomplete") if not (blobs / path.stem).exists()]
    if partial:
        found.append(f"{len(partial)} files are still incomplete in {blobs}")
    if found:
        raise CheckpointError(
            f"{name}: the download in {folder} is not whole ({'; '.join(found)}); finish it with: "
            f"{fetch}"
        )
