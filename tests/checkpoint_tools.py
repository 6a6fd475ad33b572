"""Read checkpoint folders for the golden models, and change copies of them for a test."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdtree_engine.kernels.rope import RopeTable

CheckpointMaker = Callable[..., Path]
"""The `checkpoint` fixture: family and options of make_checkpoint -> folder."""

PREFIX = "language_model."


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by stored name, read by safetensors itself."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(str(file))
    return tensors


def golden_inputs(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and weights of a target or drafter as tests/golden wants them."""
    config = read_json(folder)
    weights = {
        name.removeprefix(PREFIX): (
            tensor.float() if tensor.is_floating_point() else tensor
        ).numpy()
        for name, tensor in stored_tensors(folder).items()
    }
    return config.get("text_config", config), weights


def read_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / name).read_text())
    return data


def edit(folder: Path, change: dict[str, Any], name: str = "config.json") -> None:
    """Set keys of a JSON file, those of objects inside as `outer.inner`; None removes a key."""
    data = read_json(folder, name)
    for path, value in change.items():
        *outer, key = path.split(".")
        place = data
        for step in outer:
            place = place[step]
        place.pop(key, None)
        if value is not None:
            place[key] = value
    (folder / name).write_text(json.dumps(data))


def copy(folder: Path, to: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(folder, to)
    return to


def replace_tensors(folder: Path, changes: dict[str, Tensor]) -> None:
    """Overwrite tensors, by stored name, of a folder with one weight file."""
    tensors = stored_tensors(folder)
    assert changes.keys() <= tensors.keys(), changes.keys() - tensors.keys()
    save_file({**tensors, **changes}, str(folder / "model.safetensors"), {"format": "pt"})


def network_bytes(network: object) -> int:
    """Of every tensor that a network holds, however deep; its rotary table is no weight."""
    found: dict[int, int] = {}

    def collect(value: object) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, tuple):
            for item in value:
                collect(item)
        elif is_dataclass(value) and not isinstance(value, RopeTable):
            for one in fields(value):
                collect(getattr(value, one.name))

    collect(network)
    return sum(found.values())


Header = tuple[str, tuple[int, ...]]
"""A tensor's dtype in safetensors' words, and its shape."""


def write_headers(folder: Path, config: dict[str, Any], shards: list[dict[str, Header]]) -> None:
    """A folder of any size that takes no room: real headers, and holes instead of data."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        header, end = {}, 0
        for name, (dtype, shape) in shard.items():
            start, end = end, end + math.prod(shape) * HEADER_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


HEADER_BYTES = {"F8_E4M3": 1, "BF16": 2, "I32": 4, "F32": 4}


def write_byte_tokenizer(folder: Path) -> None:
    """A vocabulary of the 256 bytes and 256 special slots: 512 ids, [EOS] is 257."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    names = {"256": "[BOS]", "257": "[EOS]", "258": "<|im_end|>"}
    decoder = {slot: {"content": name, "special": True} for slot, name in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
