"""Options, prompts, dialogues and vocabularies of odd types and values: only our errors come."""

from __future__ import annotations

import base64
import itertools
import json
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_tools import write_byte_tokenizer
from hard import ODD_JSON, changed, edits_of, examples, outcome, paths, refused, rewrite
from hypothesis import given
from hypothesis import strategies as st

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.errors import KDTreeError
from kdtree_engine.tokenizer import Tokenizer

DIMS = Dims(num_layers=2, num_experts=4, vocab_size=512, max_positions=128)


class Unprintable:
    """A value of no use, with a name of several lines."""

    def __repr__(self) -> str:
        return "<odd\n\x1b[31mvalue>"


def odd_values() -> list[Any]:
    """New ones at each call: some can be read only once."""
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    return [
        None, True, False, 0, 1, 2, -1, 3.0, 0.5, -0.0, 1e-320, 1e39, 1e308, float("nan"),
        float("inf"), -float("inf"), 2**31, 2**63, -(2**63), 2**64, 1e-45, 10**400,
        10**5000, -(10**5000),
        Fraction(1, 3), Fraction(10**400), 1j, "", "x", "1", "ab" * 200, "\ud800", "\n\x1b[2J",
        b"abc", bytearray(b"abc"), memoryview(b"abc"), [], [1], [1, 2], [-1], [10**5000], [None],
        [True], [0.5], ["x"], ["", "x"], [["x"]], [[1, 2]], [[]], ("x", 1), {1}, frozenset({1}),
        {}, {1: 2.0}, {"1": 2}, {1: "x"}, {None: 1}, {-1: 1}, {2**70: 1}, {1: 10**400},
        {1: float("nan")}, {True: 1}, range(3), range(10**12), itertools.count(), iter("ab"),
        (one for one in (1, 2)), loop, deep, object, Unprintable(), [Unprintable()], len,
        np.int64(3), np.float32(0.5), np.bool_(True), np.str_("x"), np.array(3), np.array([1, 2]),
        np.array([[1, 2], [3, 4]]), np.array([0.5]), np.array(["x"]), np.array([]),
        np.array([None]), np.datetime64("2020-01-01"), torch.tensor(3), torch.tensor([1, 2]),
        torch.tensor([[1], [2]]), torch.tensor([0.5, float("nan")]), torch.tensor([True]),
        torch.tensor([]), torch.ones(2, device="meta"), torch.ones(2).to_sparse(),
    ]  # fmt: skip


ODD = st.integers(0, len(odd_values()) - 1).map(lambda number: odd_values()[number])
FIELDS = tuple(SamplingParams.__dataclass_fields__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("hard-options")
    make_checkpoint(home, "k2.6", dims=DIMS)
    write_byte_tokenizer(home)
    return home


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", cache_pages=4, max_requests=2)


def settled(llm: LLM, call: Any) -> Any:
    """What comes of a call; whatever it is, nothing is left behind in the engine."""
    result = outcome(call)
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    return result


def check_outputs(result: Any) -> None:
    """Outputs that ended as they should, or an error of ours."""
    if not isinstance(result, KDTreeError):
        assert all(out.error is None or "no token could be" in out.error for out in result)


def test_every_field_with_every_odd_value(llm: LLM) -> None:
    for field in FIELDS:
        for value in odd_values():
            params = outcome(lambda field=field, value=value: SamplingParams(**{field: value}))
            if isinstance(params, SamplingParams) and field not in ("max_tokens", "n"):
                hash(params)
                short = {"max_tokens": max(2, min(4, params.min_tokens))}
                call = {**vars(params), **short, "min_tokens": min(2, params.min_tokens)}
                check_outputs(
                    settled(llm, lambda c=call: llm.generate([1, 2], SamplingParams(**c)))
                )


@examples(150)
@given(st.dictionaries(st.sampled_from(FIELDS), ODD, min_size=2, max_size=6))
def test_odd_settings_together(llm: LLM, fields: dict[str, Any]) -> None:
    params = outcome(lambda: SamplingParams(**fields))
    if isinstance(params, SamplingParams) and params.n <= 4:
        call = {**vars(params), "max_tokens": 3, "min_tokens": min(3, params.min_tokens)}
        check_outputs(settled(llm, lambda: llm.generate("ab", SamplingParams(**call))))


def test_prompts_and_settings(llm: LLM) -> None:
    two = SamplingParams(max_tokens=2)
    for value in odd_values():
        check_outputs(settled(llm, lambda value=value: llm.generate(value, two)))
    for value in odd_values():
        check_outputs(settled(llm, lambda value=value: llm.generate([value, [1]], two)))
    for value in odd_values():
        if value is not None:
            settled(llm, lambda value=value: llm.generate([[1], [2]], value))
            refused(lambda value=value: list(llm.stream([1], value)))
    for value in odd_values():
        settled(llm, lambda value=value: list(llm.stream(value, two)))
        settled(llm, lambda value=value: llm.logits(value))
    refused(lambda: llm.generate(["a", [1], 3], two))
    assert len(llm.generate("\ud800\udfff a \x00 \u202e", two)) == 1


LLM_OPTIONS = ("model", "drafter", "device", "dtype", "tree_nodes", "prefill_chunk", "cache_pages")
LLM_OPTIONS += ("max_requests", "eager")


def test_options_of_the_engine(folder: Path) -> None:
    for name in LLM_OPTIONS:
        for value in odd_values():
            options = {"model": folder, "cache_pages": 2, "max_requests": 1, name: value}
            result = outcome(lambda options=options: LLM(**options))
            if isinstance(result, LLM):
                outcome(lambda made=result: made.generate([1, 2], SamplingParams(max_tokens=2)))


def test_many_requests_must_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdtree_engine.engine.memory.free_bytes", lambda device: 32 << 20)
    monkeypatch.setattr("kdtree_engine.engine.build.load_target", None)  # before any weight is read
    error = refused(lambda: LLM(folder, cache_pages=1, max_requests=4096))
    assert "max_requests 4096 take" in str(error)
    error = refused(lambda: LLM(folder, cache_pages=10**6, max_requests=1))
    assert "cache_pages 1000000 take" in str(error)


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [
            {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "f:0", "content": "result"},
]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
]


def planted(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of `data` with a value at a path."""
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = planted(copy[path[0]], path[1:], value)
    return copy


def chats(llm: LLM, messages: Any, tools: Any = TOOLS, **options: Any) -> None:
    params = SamplingParams(max_tokens=1)
    settled(llm, lambda: llm.chat(messages, params, tools, **options))


@examples(400)
@given(st.data())
def test_dialogues(llm: LLM, data: st.DataObject) -> None:
    value = data.draw(ODD)
    inside = data.draw(st.sampled_from(["messages", "tools", "switches"]))
    if inside == "messages":
        path = data.draw(st.sampled_from([(), *paths(MESSAGES)]))
        chats(llm, planted(MESSAGES, path, value))
    elif inside == "tools":
        path = data.draw(st.sampled_from([(), *paths(TOOLS)]))
        chats(llm, MESSAGES, planted(TOOLS, path, value))
    else:
        option = data.draw(st.sampled_from(["thinking", "preserve_thinking", "family"]))
        chats(llm, MESSAGES, **{option: value})


@pytest.fixture
def vocabulary(tmp_path: Path) -> Iterator[Path]:
    write_byte_tokenizer(tmp_path)
    yield tmp_path


def reads(folder: Path) -> None:
    """A vocabulary that opens encodes and decodes."""
    made = outcome(lambda: Tokenizer.from_folder(folder))
    if isinstance(made, Tokenizer):
        text = "ab é\n\ud800"
        ids = outcome(lambda: made.encode(text))
        if not isinstance(ids, KDTreeError):
            outcome(lambda: made.decode(ids))


def test_ranks(vocabulary: Path) -> None:
    file = vocabulary / "tiktoken.model"
    raw = file.read_bytes()
    odd = st.sampled_from([b"", b" ", b"\xff", b"QQ== 9", b"= =", b"QQ== -1", b"QQ==",
                           b"\x00" * 9, b"QQ== " + b"9" * 5000, b"QUJD 256",
                           b"QUJD 10000000000000"])  # fmt: skip

    @examples(80)
    @given(st.integers(0, len(raw)), odd, st.booleans())
    def check(at: int, piece: bytes, cut: bool) -> None:
        rewrite(file, raw[:at] + piece + (b"" if cut else raw[at:]))
        reads(vocabulary)

    check()
    wide = [f"{base64.b64encode(bytes([one])).decode()} {one * 10**9}" for one in range(256)]
    rewrite(file, "\n".join(wide))
    refused(lambda: Tokenizer.from_folder(vocabulary))


def test_names_of_special_tokens(vocabulary: Path) -> None:
    file = vocabulary / "tokenizer_config.json"
    data = json.loads(file.read_text())

    @examples(120)
    @given(edits_of(data))
    def check(edits: Any) -> None:
        rewrite(file, changed(data, edits))
        reads(vocabulary)

    check()


BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in BYTES]
ALPHABET = [chr(byte) for byte in BYTES] + [chr(0x100 + place) for place in range(len(OTHERS))]
JSON_VOCABULARY = {
    "added_tokens": [{"id": 256, "content": "<eos>", "special": True, "normalized": False,
                      "single_word": False, "lstrip": False, "rstrip": False}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                      "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
              "vocab": {text: number for number, text in enumerate(ALPHABET)}, "merges": []},
}  # fmt: skip


def test_tokenizer_json(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    where = [path for path in paths(JSON_VOCABULARY) if path[:2] != ("model", "vocab")]
    where += [("model", "vocab"), ("model", "vocab", "a"), ("model", "vocab", "b"), ("padding",)]
    fragment = st.sampled_from((*ODD_JSON, '[["a", "b"]]', '["a b"]', '"Sequence"', '"Split"'))
    edits = st.lists(st.tuples(st.sampled_from(where), fragment), min_size=1, max_size=3)

    @examples(250)
    @given(edits)
    def check(edits: Any) -> None:
        rewrite(file, changed(JSON_VOCABULARY, edits))
        reads(tmp_path)

    check()
    rewrite(file, json.dumps(JSON_VOCABULARY))
    assert (
        Tokenizer.from_folder(tmp_path).decode(Tokenizer.from_folder(tmp_path).encode("ab")) == "ab"
    )


def test_names_of_bytes(folder: Path) -> None:
    """A path may have bytes as its form."""
    with os.scandir(os.fsencode(folder.parent)) as found:
        for entry in found:
            outcome(lambda entry=entry: LLM(entry))
            refused(lambda entry=entry: LLM(folder, drafter=entry))
