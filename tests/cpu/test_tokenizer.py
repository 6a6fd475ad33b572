"""The vocabulary against ids computed by Moonshot's tokenizer, and its errors."""

import base64
import hashlib
import itertools
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import needs, shared_data

from kdtree_engine.errors import TokenizerError
from kdtree_engine.tokenizer import Tokenizer

DATA = shared_data("kimi-tokenizer")
needs_data = needs(DATA)


@pytest.fixture(scope="module")
def kimi() -> Tokenizer:
    return Tokenizer.from_folder(DATA)


def byte_lines() -> list[str]:
    """256 single bytes, then two merges: a vocabulary of 258 ranks."""
    tokens = [bytes([i]) for i in range(256)] + [b"ab", b"abc"]
    return [f"{base64.b64encode(t).decode()} {i}" for i, t in enumerate(tokens)]


def write_folder(folder: Path, lines: list[str], names: dict[str, object]) -> Path:
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    return folder


NAMES: dict[str, object] = {
    "258": {"content": "[BOS]", "special": True},
    "259": {"content": "<think>", "special": False},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("v"), byte_lines(), NAMES))


def digest(ids: list[int]) -> dict[str, object]:
    packed = struct.pack(f"<{len(ids)}I", *ids)
    return {
        "len": len(ids),
        "sha256_u32le": hashlib.sha256(packed).hexdigest(),
        "head": ids[:16],
        "tail": ids[-16:],
    }


@needs_data
def test_every_golden_case(kimi: Tokenizer) -> None:
    cases = json.loads((DATA / "encode_golden.json").read_text())["cases"]
    assert len(cases) == 180
    for case in cases:
        unit, times = case.get("repeat", (case.get("text"), 1))
        text = unit * times
        for want, special in ((case["ids"], True), (case["ids_no_special"], False)):
            ids = kimi.encode(text, special=special)
            assert (digest(ids) if isinstance(want, dict) else ids) == want, text[:60]
            assert kimi.decode(ids) == text


@needs_data
def test_kimi_slots(kimi: Tokenizer) -> None:
    assert kimi.vocab_size == 163_840
    assert kimi.special_ids["<|im_end|>"] == 163_586
    assert kimi.special_ids["<|reserved_token_163600|>"] == 163_600
    assert len(kimi.special_ids) == 256
    assert len([kimi.decode([i]) for i in range(kimi.vocab_size)]) == kimi.vocab_size


@needs_data
def test_skip_special_keeps_what_parsers_read(kimi: Tokenizer) -> None:
    text = "<|im_user|>hi<think>a</think><|tool_call_begin|>x<|tool_call_end|><|im_end|>[PAD]"
    ids = kimi.encode(text, special=True) + [163_600]
    assert kimi.decode(ids) == text + "<|reserved_token_163600|>"
    kept = "hi<think>a</think><|tool_call_begin|>x<|tool_call_end|>"
    assert kimi.decode(ids, skip_special=True) == kept


def test_user_text_never_becomes_special(small: Tokenizer) -> None:
    for name in small.special_ids:
        assert max(small.encode(name)) < 258
        assert small.encode(name, special=True) == [small.special_ids[name]]


def test_any_number_of_ranks(small: Tokenizer) -> None:
    assert small.vocab_size == 258 + 256
    assert small.encode("abcab") == [257, 256]
    assert small.token_bytes(257) == b"abc"
    assert small.token_bytes(258) == b"[BOS]"
    assert small.decode([258, 259, 260]) == "[BOS]<think><|reserved_token_260|>"
    assert small.decode([258, 259, 260], skip_special=True) == "<think>"
    for bad in (-1, 514):
        with pytest.raises(TokenizerError, match="outside the vocabulary"):
            small.decode([bad])


@settings(deadline=None)
@given(text=st.text())
def test_round_trip(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text)) == text


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 513) | st.sampled_from([0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98])),
    cuts=st.lists(st.integers(0, 40)),
    skip=st.sets(st.sampled_from([0, 65, 258, 0xBD])),
)
def test_stream_equals_decode(
    small: Tokenizer, ids: list[int], cuts: list[int], skip: set[int]
) -> None:
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    stream = small.stream(skip)
    parts = [stream.push(ids[a:b]) for a, b in itertools.pairwise(borders)]
    parts.append(stream.finish())
    assert "".join(parts) == small.decode([i for i in ids if i not in skip])
    assert stream.push([65]) == ("" if 65 in skip else "A"), "finish leaves a new stream"


def test_stream_holds_back_an_incomplete_character(small: Tokenizer) -> None:
    stream = small.stream()
    pushed = [stream.push([b]) for b in "a😀é".encode()]
    assert pushed == ["a", "", "", "", "😀", "", "é"]
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.finish() == "\ufffd"


def swap(index: int, line: str) -> list[str]:
    lines = byte_lines()
    lines[index] = line
    return lines


@pytest.mark.parametrize(
    ("lines", "names", "message"),
    [
        (swap(7, "!!! 7"), {}, "line 8: expected 'base64 rank'"),
        (swap(7, "Bw=="), {}, "line 8: expected 'base64 rank'"),
        (swap(7, "Bw== seven"), {}, "line 8: expected 'base64 rank'"),
        (swap(7, "Bw== 6"), {}, "line 8: rank 6 occurs twice"),
        (swap(7, "Bg== 7"), {}, "line 8: token .* occurs twice"),
        (swap(257, "YWJj 300"), {}, "rank 257 is missing"),
        (swap(7, "YWJjZA== 7"), {}, "1 single bytes have no token, first 0x07"),
        ([], {}, "holds no tokens"),
        (byte_lines(), {"257": {"content": "X"}}, "outside the 256 slots 258..513"),
        (byte_lines(), {"514": {"content": "X"}}, "outside the 256 slots 258..513"),
        (byte_lines(), {"258": {"content": "X"}, "259": {"content": "X"}}, "both named 'X'"),
        (byte_lines(), {"258": {"special": True}}, "is not an id with a 'content'"),
        (byte_lines(), {"x": {"content": "X"}}, "is not an id with a 'content'"),
        (byte_lines(), {"9" * 5000: {"content": "X"}}, "is not an id with a 'content'"),
        (swap(7, "Bw== " + "9" * 5000), {}, "line 8: expected 'base64 rank'"),
    ],
)
def test_broken_vocabulary(
    tmp_path: Path, lines: list[str], names: dict[str, object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(write_folder(tmp_path, lines, names))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_missing_or_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tiktoken\.model: no such file"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    write_folder(tmp_path, byte_lines(), NAMES)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="is not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    for text, said in (("[]", "expected a JSON object"), ("{}", "added_tokens_decoder")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(TokenizerError, match=said):
            Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: no such file"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_links_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """The rule of the checkpoints' reader: no file outside of a stranger's folder is opened."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_folder(folder, byte_lines(), NAMES)
    (folder / name).rename(folder / "inside")
    (folder / name).symlink_to("inside")
    assert Tokenizer.from_folder(folder).vocab_size == 514
    (folder / "inside").rename(tmp_path / "outside")
    (folder / name).unlink()
    (folder / name).symlink_to("../outside")
    with pytest.raises(TokenizerError, match="is a link that leaves the folder") as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / name) in str(caught.value) and "\n" not in str(caught.value)
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_folder(folder)


def test_a_download_in_the_hub_cache_is_read(tmp_path: Path) -> None:
    """There a snapshot's files are links into the `blobs` folder beside `snapshots`."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_folder(blobs, byte_lines(), NAMES)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert Tokenizer.from_folder(snapshot).vocab_size == 514
