"""Safetensors folders: one file, or shards with an index. Headers are read, tensors only on demand.

A folder is data from a stranger: no pickle and no code is ever loaded from it, and no file outside
of it is opened. One exception to the latter, since it is how Hugging Face's cache keeps a download:
`snapshots/<revision>/NAME` may be a symbolic link into the `blobs` folder beside `snapshots`.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kdtree_engine.errors import CheckpointError, ConfigError, TokenizerError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

MAX_TEXT_BYTES = 1 << 28
"""More than any config, index or vocabulary has: such files are read whole."""

Kind = type[CheckpointError] | type[ConfigError] | type[TokenizerError]


@dataclass(frozen=True)
class StoredTensor:
    """What a header says of a tensor: shape in elements, dtype in safetensors' words ("BF16")."""

    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its data; the dtype's name has the bits of one element, BOOL has 8."""
        bits = re.search(r"\d+", self.dtype)
        return self.elements * (int(bits[0]) if bits else 8) // 8


def few(names: list[str], limit: int = 3) -> str:
    """The first `limit` names and how many more there are, for a message of one line."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def safe_path(folder: Path, name: str) -> Path:
    """The path of file `name` directly in `folder`; CheckpointError if it leads outside of it."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name inside the folder")
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; half a character
        raise CheckpointError(f"{path}: cannot be followed ({error})") from error
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in homes):
        raise CheckpointError(f"{path}: is a link that leaves the folder, to {target}")
    return path


def present(path: Path) -> bool:
    """Whether a folder has an entry of that name, if only a link that leads nowhere.

    So a file that has got lost is an error of whoever reads it, not a file that never was.
    """
    return os.path.lexists(path)


def is_file(path: Path) -> bool:
    """Whether a path leads to a file; no error of the system's for a name that is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_bytes(folder: Path, name: str, kind: Kind) -> bytes:
    """What is in the file `folder / name`; an error of `kind` if it is absent or unreadable.

    Only a plain file is opened: a pipe would keep its reader waiting, a device never end.
    """
    path = safe_path(folder, name)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise kind(f"{path}: is not a file; a model folder holds one")
        if found.st_size > MAX_TEXT_BYTES:
            raise kind(
                f"{path}: has {found.st_size} bytes, which is no such file; expected at most "
                f"{MAX_TEXT_BYTES}"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise kind(f"{path}: no such file; a model folder holds one") from error
    except OSError as error:
        raise kind(f"{path}: cannot be read ({error})") from error


def read_text(folder: Path, name: str, kind: Kind) -> str:
    """The text in the file `folder / name`, as `read_bytes`."""
    try:
        return read_bytes(folder, name, kind).decode()
    except UnicodeDecodeError as error:
        raise kind(f"{folder / name}: cannot be read ({error})") from error


def read_json(folder: Path, name: str, kind: Kind) -> dict[str, Any]:
    """The object in the JSON file `folder / name`; an error of `kind` if it is absent or broken."""
    path, text = folder / name, read_text(folder, name, kind)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise kind(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise kind(f"{path}: holds a {type(data).__name__}, expected a JSON object")
    return data


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index of `folder` says. CheckpointError if it is broken."""
    weight_map = read_json(folder, INDEX_FILE, CheckpointError).get("weight_map")
    path = folder / INDEX_FILE
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path}: has no "weight_map" from tensor names to files')
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f'{path}: "weight_map" has a value that is not a file name')
    return weight_map


def missing_shards(folder: Path, weight_map: dict[str, str]) -> str:
    """Which shards of an index are not there, for a message; "" where all are."""
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not is_file(safe_path(folder, file))]
    return f"{len(absent)} of {len(files)} shards are missing: {few(absent)}" if absent else ""


def check_folder(folder: Path) -> None:
    """CheckpointError unless `folder` is an existing directory."""
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder}: no such folder") from error
    except (OSError, ValueError) as error:  # a loop of links, a name that is too long or no name
        raise CheckpointError(f"{folder}: cannot be opened ({error})") from error
    if not stat.S_ISDIR(found.st_mode):
        raise CheckpointError(f"{folder}: is a file, expected a model folder")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(f"{folder}: may not be read; change its permissions")


class SafetensorsFolder:
    """All tensors of a folder by stored name. Opening reads the headers; nothing is cached.

    `tensors` maps a name to its StoredTensor. `unindexed` counts tensors that the index leaves out.
    The files stay open (mapped, not loaded) until `close` or until the object is dropped. They must
    not change meanwhile: a read looks whether its file has the size that it had, but one that
    shrinks during the read ends the process (SIGBUS), since that is what mapped memory does.
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.unindexed = 0
        self._files: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        if present(folder / SINGLE_FILE):
            self._open(SINGLE_FILE)
            self.tensors = self._header(SINGLE_FILE)
        elif present(folder / INDEX_FILE):
            self._read_index()
        else:
            raise CheckpointError(f"{folder}: {_why_no_weights(folder)}")

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Tensor `name`, or some rows and columns of it, as stored, in memory of its own (CPU).

        Only the bytes asked for are read. CheckpointError for an unknown name.
        """
        part = self.view(name, rows, columns)
        # Own memory: the map dies with the file, and its alignment follows the header's length.
        return part.clone(memory_format=torch.contiguous_format)

    def view(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Like `read`, but perhaps a view of the mapped file: for use at once, never to be kept."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: holds no tensor {name}")
        file = self.tensors[name].file
        handle = self._files[file]
        try:
            if (self.folder / file).stat().st_size != self._sizes[file]:
                raise CheckpointError(
                    f"{self.folder / file}: has changed since it was opened; open the folder again "
                    "once nothing writes to it"
                )
            if rows is None and columns is None:
                tensor = handle.get_tensor(name)
            elif columns is None:
                tensor = handle.get_slice(name)[rows]
            else:
                tensor = handle.get_slice(name)[rows or slice(None), columns]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read ({error})") from error
        assert isinstance(tensor, Tensor)
        return tensor

    def close(self) -> None:
        """Close the files. Nothing can be read afterwards."""
        self._files.clear()
        self.tensors = {}

    def _open(self, name: str) -> None:
        path = safe_path(self.folder, name)
        if not is_file(path):
            raise CheckpointError(f"{path}: no such file")
        try:
            self._sizes[name] = path.stat().st_size
            self._files[name] = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: is truncated or not a safetensors file ({error}); download it again"
            ) from error

    def _header(self, name: str) -> dict[str, StoredTensor]:
        handle = self._files[name]
        header = {}
        for tensor in handle.keys():  # noqa: SIM118 - a handle is no mapping
            entry = handle.get_slice(tensor)
            header[tensor] = StoredTensor(name, tuple(entry.get_shape()), entry.get_dtype())
        return header

    def _read_index(self) -> None:
        path, weight_map = self.folder / INDEX_FILE, read_weight_map(self.folder)
        absent = missing_shards(self.folder, weight_map)
        if absent:
            raise CheckpointError(f"{self.folder}: {absent}; download them again")
        stored: dict[str, dict[str, StoredTensor]] = {}
        for file in sorted(set(weight_map.values())):
            self._open(file)
            stored[file] = self._header(file)
        lost = [name for name, file in weight_map.items() if name not in stored[file]]
        if lost:
            raise CheckpointError(
                f"{path}: names tensors that their shards do not hold: "
                f"{few([f'{name} ({weight_map[name]})' for name in lost])}"
            )
        self.tensors = {name: stored[file][name] for name, file in weight_map.items()}
        self.unindexed = sum(
            weight_map.get(name) != file for file, header in stored.items() for name in header
        )


def _why_no_weights(folder: Path) -> str:
    """Why a folder with neither a single file nor an index cannot be read, and what to do."""
    files = sorted(path.name for path in folder.iterdir())
    shards = [name for name in files if name.endswith(".safetensors")]
    if shards:
        return f"holds {few(shards)} but no {INDEX_FILE}; download it again"
    pickles = [name for name in files if name.endswith(PICKLES)]
    if pickles:
        return f"holds {few(pickles)}; only safetensors are read, since pickles can run code"
    return f"holds no weights ({SINGLE_FILE}, or shards with {INDEX_FILE})"
