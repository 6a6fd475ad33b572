"""Damaged and hostile folders: only errors of ours come, of one line, in little time and memory.

What happens to a folder is drawn by hypothesis, the same at every run; a folder that still opens
must compute, or say that its logits are not finite.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import stored_tensors, write_byte_tokenizer
from hard import (
    ODD_JSON,
    changed,
    computes,
    edits_of,
    examples,
    outcome,
    refused,
    rewrite,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints import find_folder, open_drafter, open_model
from kdtree_engine.checkpoints.reader import INDEX_FILE, MAX_TEXT_BYTES, SafetensorsFolder
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.cli.app import run
from kdtree_engine.errors import KDTreeError
from kdtree_engine.tokenizer import ChatFormat, Tokenizer

DIMS = Dims(num_layers=2, num_experts=4, max_positions=128)
MODELS: dict[str, dict[str, Any]] = {
    "k2.6": {},
    "k2": {},
    "deepseek-v3": {"dims": Dims(num_layers=3, max_positions=128)},
    "deepseek-v3 fp8": {"form": "fp8", "dims": Dims(num_layers=3, max_positions=128)},
}
WEIGHTS = "model.safetensors"
LITTLE = 64 << 20  # bytes of Python's own objects


def build(root: Path, name: str, **options: Any) -> Path:
    """A folder of a test's own, with a drafter."""
    family = name.split()[0]
    settings = {"dims": DIMS, "drafter": True, **MODELS[name], **options}
    make_checkpoint(root / "folder", family, **settings)
    return root / "folder"


def opens(folder: Path, opener: Callable[[Path], Any] = open_model) -> bool:
    """Whether a folder opens; else the error was one of ours."""
    result = outcome(lambda: opener(folder))
    if isinstance(result, KDTreeError):
        return False
    result.close()
    return True


@pytest.mark.parametrize("name", MODELS)
def test_config_of_a_target(tmp_path: Path, name: str) -> None:
    folder = build(tmp_path, name)
    data = json.loads((folder / "config.json").read_text())
    data.pop("vision_config", None)  # which nobody reads

    @examples(50)
    @given(edits_of(data))
    def check(edits: Any) -> None:
        rewrite(folder / "config.json", changed(data, edits))
        if opens(folder):
            outcome(lambda: computes(folder))

    check()


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_config_of_a_drafter(tmp_path: Path, layout: str) -> None:
    folder = build(tmp_path, "k2.6", layout=layout)
    file = folder / "drafter" / "config.json"
    data = json.loads(file.read_text())

    @examples(50)
    @given(edits_of(data))
    def check(edits: Any) -> None:
        rewrite(file, changed(data, edits))
        if opens(file.parent, open_drafter):
            outcome(lambda: computes(folder, drafter=file.parent))

    check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("n_routed_experts", 10**7),
        ("n_shared_experts", 2**31 - 1),
        ("vocab_size", 2**31 - 1),
        ("max_position_embeddings", 10**12),
        ("qk_nope_head_dim", 2**31 - 1),
        ("num_nextn_predict_layers", 4096),
        ("eos_token_id", list(range(200_000))),
    ],
)
def test_absurd_sizes_take_no_memory(tmp_path: Path, key: str, value: Any) -> None:
    folder = build(tmp_path, "k2")
    data = json.loads((folder / "config.json").read_text())
    rewrite(folder / "config.json", json.dumps({**data, key: value}))
    tracemalloc.start()
    try:
        opened = opens(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert opened == (key in ("num_nextn_predict_layers", "eos_token_id"))
    assert peak < LITTLE


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_other_files_of_a_target(tmp_path: Path, name: str) -> None:
    folder = build(tmp_path, "k2.6", dims=Dims(num_layers=2, num_experts=4, vocab_size=512))
    write_byte_tokenizer(folder)
    data = json.loads((folder / name).read_text())
    data |= {"chat_template": "{{ messages }}"}

    @examples(40)
    @given(edits_of(data))
    def check(edits: Any) -> None:
        rewrite(folder / name, changed(data, edits))
        outcome(lambda: computes(folder))

    check()


def header_of(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    header: dict[str, Any] = json.loads(raw[8:end])
    return header, raw[end:]


@pytest.mark.parametrize("name", ["k2.6", "k2"])
def test_damaged_weights(tmp_path: Path, name: str) -> None:
    """Cut off anywhere, or one bit changed anywhere, the header's length included."""
    folder = build(tmp_path, name, drafter=False)
    raw = (folder / WEIGHTS).read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    place = st.one_of(st.integers(0, 7), st.integers(8, end - 1), st.integers(end, len(raw) - 1))

    @examples(70)
    @given(place, st.one_of(st.none(), st.integers(0, 7)))
    def check(at: int, bit: int | None) -> None:
        damaged = bytearray(raw[:at] if bit is None else raw)
        if bit is not None:
            damaged[at] ^= 1 << bit
        rewrite(folder / WEIGHTS, bytes(damaged))
        opened = opens(folder)
        assert not opened or bit is not None
        if opened:
            outcome(lambda: computes(folder))

    check()


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 10**8 + 1, 10**6, 1, 0])
def test_length_of_a_header(tmp_path: Path, length: int) -> None:
    folder = build(tmp_path, "k2", drafter=False)
    raw = (folder / WEIGHTS).read_bytes()
    rewrite(folder / WEIGHTS, struct.pack("<Q", length) + raw[8:])
    assert not opens(folder)


DTYPES = (
    "BF16",
    "F32",
    "F16",
    "F64",
    "I32",
    "I64",
    "U8",
    "BOOL",
    "F8_E4M3",
    "F8_E5M2",
    "C64",
    "F4",
)
OFFSETS = ("[0, 0]", "[64, 0]", "[0, 9223372036854775807]", "[4611686018427387904, 4]", "[-1, 1]")
ODD_HEADER = (*ODD_JSON, *(json.dumps(dtype) for dtype in DTYPES), *OFFSETS)


@pytest.mark.parametrize("name", ["k2.6", "k2"])
def test_header(tmp_path: Path, name: str) -> None:
    """Other offsets, dtypes and shapes; what the config promises is what must be there."""
    folder = build(tmp_path, name, drafter=False)
    header, body = header_of((folder / WEIGHTS).read_bytes())
    names = st.sampled_from(sorted(header))
    keys = st.sampled_from([("dtype",), ("shape",), ("shape", 0), ("data_offsets",), ()])
    paths = st.builds(lambda one, rest: (one, *rest), names, keys)
    edits = st.lists(st.tuples(paths, st.sampled_from(ODD_HEADER)), min_size=1, max_size=3)

    @examples(100)
    @given(edits)
    def check(edits: Any) -> None:
        text = changed(header, edits).encode()
        rewrite(folder / WEIGHTS, struct.pack("<Q", len(text)) + text + body)
        if opens(folder):
            outcome(lambda: computes(folder))

    check()


def test_a_wrong_dtype_or_nothing_for_every_kind_of_tensor(tmp_path: Path) -> None:
    for name in ("k2.6", "k2"):
        folder = build(tmp_path / name, name, drafter=False)
        tensors = stored_tensors(folder)
        layers = {
            stored for stored in tensors if ".layers.1." in stored or ".layers." not in stored
        }
        one_expert = {
            stored for stored in layers if ".experts." not in stored or ".experts.0." in stored
        }
        for stored in sorted(one_expert - {s for s in tensors if "vision" in s or "mm_proj" in s}):
            own = tensors[stored]
            for wrong in (own.to(torch.complex64), own.flatten()[:0], own[None]):
                (folder / WEIGHTS).unlink()
                save_file({**tensors, stored: wrong.contiguous()}, folder / WEIGHTS)
                error = refused(lambda folder=folder: open_model(folder))
                assert stored.removeprefix("language_model.") in str(error)


@pytest.mark.parametrize("name", ["k2.6", "k2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    """In an expert: the requests that meet it fail, others go on."""
    folder = build(tmp_path, name, drafter=False)
    tensors = stored_tensors(folder)
    part = ".weight_scale" if name == "k2.6" else ".weight_scale_inv"
    scales = {
        key: one for key, one in tensors.items() if key.endswith(".experts.0.down_proj" + part)
    }
    assert scales
    spoilt = {key: torch.full_like(one, value) for key, one in scales.items()}
    rewrite(folder / WEIGHTS, b"")
    save_file({**tensors, **spoilt}, folder / WEIGHTS)
    llm = LLM(folder, device="cpu", cache_pages=8, max_requests=4)
    outs = llm.generate([[token] for token in range(40)], SamplingParams(max_tokens=2))
    llm.engine.check_integrity()
    errors = [out.error for out in outs if out.error is not None]
    assert errors and all("not finite" in error for error in errors)
    assert any(out.error is None and out.token_ids for out in outs)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return build(tmp_path, "k2.6", drafter=False, max_file_bytes=100_000)


ODD_FILES = (
    "", ".", "..", "../outside", "/etc/passwd", "/dev/zero", "sub", "pipe", "leaves", "loop",
    "lost", "zero", INDEX_FILE, "config.json", "x" * 300, "y" * 100_000, "\ud800", "a\0b",
    "a\nb\x1b[2J",
    "nowhere.safetensors", "C:\\x", "empty",
)  # fmt: skip


def plant(folder: Path, outside: Path) -> None:
    """Entries that are no weights."""
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    outside.write_bytes(b"secret")
    (folder / "leaves").symlink_to(outside)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "lost").symlink_to(folder / "nowhere")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "empty").touch()


def test_index(sharded: Path, tmp_path: Path) -> None:
    plant(sharded, tmp_path / "outside")
    good = json.loads((sharded / INDEX_FILE).read_text())
    stored = sorted(good["weight_map"])
    files = sorted(set(good["weight_map"].values()))
    for odd in (*ODD_FILES, next(one for one in files if one != good["weight_map"][stored[0]])):
        rewrite(sharded / INDEX_FILE, changed(good, [(("weight_map", stored[0]), json.dumps(odd))]))
        assert "secret" not in str(refused(lambda: open_model(sharded)))

    paths = [("weight_map",), ("metadata",), *(("weight_map", one) for one in stored[:3])]
    fragments = st.sampled_from((*ODD_JSON, *map(json.dumps, ODD_FILES)))
    edits = st.lists(st.tuples(st.sampled_from(paths), fragments), min_size=1, max_size=3)

    @examples(40)
    @given(edits)
    def check(edits: Any) -> None:
        rewrite(sharded / INDEX_FILE, changed(good, edits))
        opens(sharded)

    check()


def test_shards_in_each_others_place(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    first.rename(sharded / "spare")
    second.rename(first)
    (sharded / "spare").rename(second)
    assert "their shards do not hold" in str(refused(lambda: open_model(sharded)))


FILES = (
    "config.json",
    "generation_config.json",
    WEIGHTS,
    "tokenizer_config.json",
    "tiktoken.model",
)
FILES += ("tokenizer.json", "chat_template.jinja", "chat_template.json", INDEX_FILE)


@pytest.mark.parametrize("entry", ["sub", "pipe", "leaves", "loop", "lost", "zero", "empty"])
def test_no_file_in_the_place_of_one(tmp_path: Path, entry: str) -> None:
    """A folder, a pipe (which nobody may wait for), a device, links that lead out or nowhere."""
    folder = build(tmp_path, "k2.6", drafter=False, max_file_bytes=None)
    write_byte_tokenizer(folder)
    good = {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}
    plant(folder, tmp_path / "outside")
    for name in FILES:
        file = folder / name
        if name == INDEX_FILE:
            (folder / WEIGHTS).unlink()
        file.unlink(missing_ok=True)
        os.rename(folder / entry, file)
        for call in (
            lambda: open_model(folder),
            lambda: Tokenizer.from_folder(folder),
            lambda: ChatFormat.from_folder(folder, "template"),
            lambda: LLM(folder, cache_pages=1),
        ):
            outcome(call)
        if name in ("config.json", WEIGHTS, INDEX_FILE):
            refused(lambda: open_model(folder))
        os.rename(file, folder / entry)
        if name in good:
            rewrite(file, good[name])


def test_too_large_to_be_a_config(tmp_path: Path) -> None:
    folder = build(tmp_path, "k2", drafter=False)
    with (folder / "config.json").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    assert "expected at most" in str(refused(lambda: open_model(folder)))


def test_weights_that_shrink(tmp_path: Path) -> None:
    """Once they are open: the next read says so. (One that is under way ends the process.)"""
    folder = build(tmp_path, "k2", drafter=False)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kdtree_engine.checkpoints import open_model\n"
        "from kdtree_engine.errors import CheckpointError\n"
        "model = open_model(Path(sys.argv[1]))\n"
        "with open(Path(sys.argv[1]) / 'model.safetensors', 'r+b') as file: file.truncate(4096)\n"
        "try: model.tensor('lm_head.weight')\n"
        "except CheckpointError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "has changed since it was opened" in done.stdout


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A temporary folder that other users may enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_folder_that_may_not_be_read(open_to_all: Path) -> None:
    folder = build(open_to_all, "k2", drafter=False)
    for place in (folder, folder / WEIGHTS, folder / "config.json"):
        mode = place.stat().st_mode
        place.chmod(0)
        root = os.geteuid() == 0
        if root:  # who may read everything
            os.setresuid(65534, 65534, 0)
        try:
            error = refused(lambda: open_model(folder))
        finally:
            if root:
                os.setresuid(0, 0, 0)
        assert str(place) in str(error)
        place.chmod(mode)


NAMES = (
    "", ".", "..", "../..", "a/b", "a/..", "../b", "a/b@..", "a/b@../..", "a/b@refs/x", "a/b@",
    "a/b@main@x", "a b/c", "a/b\n", "a\0/b", "\ud800/b", "é/ü", "-a/b", "a" * 96 + "/" + "b" * 96,
    "a" * 300 + "/b", "a/" + "b/" * 3000, "x" * 100_000, "a/b@" + "c/" * 2000 + "d", "/dev/zero",
    "/etc/passwd", "a/loop", "a/files", "a/b@loop", "a/b@garbage", "a/b@path", "a/b@pipe",
    "a/b@sub",
)  # fmt: skip


def test_names_of_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    home = hub / "models--a--b"
    (home / "refs" / "sub").mkdir(parents=True)
    (home / "snapshots" / "0123").mkdir(parents=True)
    (home / "refs" / "main").write_text("0123")
    (home / "refs" / "garbage").write_bytes(b"\xff\xfe" * 1000)
    (home / "refs" / "path").write_text("../../../etc\n")
    (home / "refs" / "loop").symlink_to("loop")
    os.mkfifo(home / "refs" / "pipe")
    (hub / "models--a--loop").symlink_to("models--a--loop")
    (hub / "models--a--files").mkdir()
    (hub / "models--a--files" / "snapshots").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        found = outcome(lambda name=name: find_folder(name))
        assert isinstance(found, KDTreeError) or not str(found).startswith("/etc/p/")
        refused(lambda name=name: LLM(name))
        refused(lambda name=name: LLM(drafter=name) if name else LLM(name))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kdtree inspect` ends with one line for each of these."""
    folder = build(tmp_path, "k2.6")
    plant(folder, tmp_path / "outside")
    broken = [folder / one for one in ("sub", "pipe", "loop", "lost", "zero", "empty", "a\nb")]
    for place in (*broken, "x" * 5000, "a/b@..", "\ud800"):
        assert run(["inspect", str(place)]) != 0
        captured = capsys.readouterr()
        assert captured.err.startswith("kdtree: ") and captured.err.count("\n") == 1, captured.err
    shutil.rmtree(folder / "drafter")
    assert run(["inspect", str(folder), "--json"]) == 0


def test_only_asked_for_tensors_are_known(tmp_path: Path) -> None:
    files = SafetensorsFolder(build(tmp_path, "k2", drafter=False))
    for name in ("", "x\ny", "\ud800", "z" * 100_000):
        refused(lambda name=name: files.read(name))
