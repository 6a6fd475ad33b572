"""Names of downloads: found in the Hugging Face cache, never fetched, refused where files lack."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kdtree_engine import LLM, SamplingParams, cli
from kdtree_engine.checkpoints import find_folder, open_model
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.engine.build import packaged_model
from kdtree_engine.env import hub_cache
from kdtree_engine.errors import CheckpointError, OptionError

NAME, COMMIT = "kd-lab/Tiny-K2.6", "0123456789abcdef0123456789abcdef01234567"


def download(cache: Path, source: Path, name: str = NAME, commit: str = COMMIT) -> Path:
    """The files of `source` laid out as `hf download NAME` leaves them; returns the snapshot."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir(exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs/main").write_text(commit)
    for number, file in enumerate(sorted(path for path in source.iterdir() if path.is_file())):
        blob = home / "blobs" / f"{commit[:8]}{number}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that the environment points at."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def snapshot(cache: Path, tmp_path: Path) -> Path:
    """A sharded K2.6 folder as a download of NAME."""
    make_checkpoint(tmp_path / "made", "k2.6", max_file_bytes=200_000)
    return download(cache, tmp_path / "made")


def refused(name: str, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_folder(name)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "/a/b", "HF_HOME": "/c"}, "/a/b"),
        ({"HF_HUB_CACHE": "", "HF_HOME": "/c"}, "/c/hub"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/x"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, "~/.cache/huggingface/hub"),
        ({"HF_HOME": "~/hf"}, "~/hf/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "/o", "HF_HOME": "/c"}, "/o"),
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/o"}, "/a"),
        ({"HF_HUB_CACHE": "$S/a", "S": "/s"}, "/s/a"),
        ({"HF_HOME": "${S}/hf", "S": "~/s"}, "~/s/hf/hub"),
        ({"XDG_CACHE_HOME": "$NONE/x"}, "$NONE/x/huggingface/hub"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], place: str) -> None:
    assert hub_cache(variables) == Path(place).expanduser()


def test_a_home_that_is_nowhere_is_one_line() -> None:
    with pytest.raises(OptionError, match="HF_HOME is '~nosuchuser/x', whose ~ has no home"):
        hub_cache({"HF_HOME": "~nosuchuser/x"})


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(CheckpointError, match="is empty: give a folder or ORG/NAME"):
        find_folder("")


def test_a_name_is_its_download(snapshot: Path) -> None:
    address = f"https://huggingface.co/{NAME}"
    for name in (NAME, f"{NAME}@main", f"{NAME}@{COMMIT}", f"{NAME}/", address):
        assert find_folder(name) == snapshot
    assert open_model(find_folder(NAME)).config.num_layers == 4


def test_revisions(snapshot: Path, cache: Path, tmp_path: Path) -> None:
    newer = "f" * 40
    make_checkpoint(tmp_path / "newer", "k2.6", seed=1)
    other = download(cache, tmp_path / "newer", commit=newer)
    home = snapshot.parents[1]
    (home / "refs/pr").mkdir()
    (home / "refs/pr/1").write_text(COMMIT + "\n")
    assert find_folder(NAME) == other
    assert find_folder(f"{NAME}@{COMMIT}") == find_folder(f"{NAME}@pr/1") == snapshot
    (home / "refs/main").unlink()
    fetch = f"hf download {NAME}"
    refused(NAME, "has no revision main", f"it has {NAME}@{COMMIT}, {NAME}@{newer}", fetch)
    refused(f"{NAME}@v2", "has no revision v2", f"{fetch} --revision v2")
    (home / "refs/main").write_text("../../../outside")
    refused(NAME, "has no revision main")


def test_a_folder_of_that_name_wins(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert find_folder(NAME) == Path(NAME)
    assert find_folder(tmp_path / "nowhere") == tmp_path / "nowhere"
    assert find_folder("nowhere") == Path("nowhere")


def test_what_was_never_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what, where and how to get it; nothing is asked of the network."""

    def no_network(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    place = f"{cache}/models--moonshotai--Kimi-K2.6"
    refused(
        "moonshotai/Kimi-K2.6", "no such folder here", place, "hf download moonshotai/Kimi-K2.6"
    )
    refused("a/b@v1", "hf download a/b --revision v1")
    fetch = "hf download moonshotai/Kimi-K2.6"
    for name in (
        "moonshotai/Kimi-K2.6/",
        "https://huggingface.co/moonshotai/Kimi-K2.6",
        "https://hf.co/moonshotai/Kimi-K2.6/tree/main/",
        "moonshotai/Kimi-K2.6@feature/a+b#1",
    ):
        refused(name, "moonshotai/Kimi-K2.6: there is no such folder here", fetch)
    refused("a/b@x;y", "--revision 'x;y'")
    for name in ("a/b@../../x", "a/b@x/../y", "a/../b", "https://other.org/a/b"):
        assert find_folder(name) == Path(name)
    with pytest.raises(CheckpointError, match="hf download a/b"):
        LLM("a/b", device="cpu")


def test_a_lost_shard(snapshot: Path) -> None:
    count = len(list(snapshot.glob("*.safetensors")))
    shard = sorted(snapshot.glob("*.safetensors"))[1]
    blob = shard.resolve()
    shard.unlink()
    refused(NAME, f"1 of {count} shards are missing: {shard.name}", f"hf download {NAME}")
    # As a download leaves it that was cut off: the link comes when the file is whole.
    blob.rename(blob.with_name(blob.name + ".0a1b2c3d.incomplete"))
    refused(NAME, "not whole", shard.name, "cut off left 1 .incomplete in blobs")


@pytest.mark.parametrize("name", ["aaaa.incomplete", "aaaa.0a1b2c3d.incomplete"])
def test_what_a_killed_download_left_refuses_nothing(snapshot: Path, name: str) -> None:
    """Nobody removes it, and it may be another revision's: the snapshot is whole."""
    (snapshot.parents[1] / "blobs" / name).write_bytes(b"x")
    assert find_folder(NAME) == snapshot


def test_a_download_that_goes_on(snapshot: Path) -> None:
    """Files arrive in any order; what is not there yet is named."""
    index = snapshot / "model.safetensors.index.json"
    (snapshot.parents[1] / "blobs" / "aaaa.0a1b2c3d.incomplete").write_bytes(b"x")
    held = index.readlink()
    index.unlink()
    refused(NAME, "neither model.safetensors nor model.safetensors.index.json", "1 .incomplete")
    index.symlink_to(held)
    (snapshot / "config.json").unlink()
    refused(NAME, "config.json is missing", "1 .incomplete")


def test_pickles_are_for_the_reader_to_refuse(snapshot: Path) -> None:
    for path in snapshot.glob("*.safetensors*"):
        path.unlink()
    (snapshot / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickles can run code"):
        open_model(find_folder(NAME))


def test_a_link_to_nothing(snapshot: Path) -> None:
    (snapshot / "config.json").resolve().unlink()
    refused(NAME, "links lead nowhere: config.json")


def test_names_in_the_engine_and_the_command(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The packaged model and its drafter as downloads: tokenizer, chat template and weights."""
    own = packaged_model()
    download(cache, own / "target", "kd/target")
    download(cache, own / "drafter", "kd/drafter")
    llm = LLM("kd/target", drafter="kd/drafter", device="cpu")
    wanted = LLM(device="cpu").generate(["def f("], SamplingParams(max_tokens=8))[0]
    assert llm.generate(["def f("], SamplingParams(max_tokens=8))[0].text == wanted.text
    arguments = [
        "generate",
        "kd/target",
        "--drafter",
        "kd/none",
        "--prompt",
        "x",
        "--device",
        "cpu",
    ]
    assert cli.run(arguments) == 1
    assert "hf download kd/none" in capsys.readouterr().err
    with pytest.raises(OptionError, match="neither a folder nor one of"):
        LLM("kd/target", drafter="eagle", device="cpu")
