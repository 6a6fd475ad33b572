"""Vocabularies in tokenizer.json: a small byte-level one, made here."""

# ruff: noqa: RUF001 (DeepSeek names its tokens with full-width bars)

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoint_tools import CheckpointMaker
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.errors import TokenizerError
from kdtree_engine.tokenizer import ChatFormat, KimiTokenizer, Tokenizer
from kdtree_engine.tokenizer.json_vocabulary import JsonTokenizer

TEXT = [
    "the quick brown fox",
    "def f(x):\n    return x",
    "naïve 北京 日本語 émigré",
    "the then them",
]
# As in DeepSeek-V3: the marks of turns are not called special, and there are gaps in the ids.
ADDED = [
    (0, "<｜begin▁of▁sentence｜>", True),
    (400, "<｜User｜>", False),
    (401, "<｜Assistant｜>", False),
    (405, "<think>", False),
    (406, "</think>", False),
    (407, "<｜end▁of▁sentence｜>", True),
    (408, "    ", False),
]


def added(slot: int, name: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    return {"id": slot, "content": name, "special": special, **flags}


def make() -> dict[str, Any]:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<｜begin▁of▁sentence｜>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(TEXT * 5, trainer)
    data: dict[str, Any] = json.loads(made.to_str())
    data["added_tokens"] = [added(*entry) for entry in ADDED]
    return data


DATA = make()
SMALL = JsonTokenizer(DATA)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(DATA))
    return tmp_path


def test_the_folder_picks_the_class(folder: Path) -> None:
    assert Tokenizer.in_folder(folder) and not Tokenizer.in_folder(folder / "none")
    assert isinstance(Tokenizer.from_folder(folder), JsonTokenizer)
    (folder / "tiktoken.model").write_text("")  # both: the Kimi line's own file counts
    with pytest.raises(TokenizerError, match=r"tiktoken.model holds no tokens"):
        Tokenizer.from_folder(folder)
    (folder / "tiktoken.model").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tiktoken\.model"):
        Tokenizer.from_folder(folder)


def test_what_it_says_of_itself() -> None:
    assert SMALL.vocab_size == 409
    assert SMALL.special_ids["<｜User｜>"] == 400 and "    " not in SMALL.special_ids
    assert SMALL.hidden_ids == {0, 407}
    assert SMALL.fits(409) and SMALL.fits(512) and not SMALL.fits(408)
    kimi = KimiTokenizer({bytes([i]): i for i in range(256)}, {})
    assert kimi.fits(512) and not kimi.fits(513)


def test_names_are_special_only_where_allowed() -> None:
    text = "<｜User｜>hi<｜Assistant｜><think>the</think>"
    ids = SMALL.encode(text, special=True)
    assert [i for i in ids if i >= 400] == [400, 401, 405, 406]
    plain = SMALL.encode(text)
    assert all(0 < i < 400 for i in plain) and SMALL.decode(plain) == text
    parts = [("<｜User｜>", True), ("hi", False), ("<｜Assistant｜>", True), ("<think>", True)]
    assert SMALL.encode_parts([*parts, ("the", False), ("</think>", True)]) == ids
    with pytest.raises(TokenizerError, match=r"no token <\|im_end\|>"):
        SMALL.encode_parts([("<|im_end|>", True)])


def test_without_gaps_the_ids_are_the_librarys() -> None:
    data = {**DATA, "added_tokens": [added(300 + i, *rest) for i, (_, *rest) in enumerate(ADDED)]}
    data["added_tokens"][0]["id"] = 0
    for place, entry in enumerate(data["added_tokens"][1:]):
        entry["id"] = 300 + place
    library = tokenizers.Tokenizer.from_str(json.dumps(data))
    for text in ("<｜User｜>hi    x<｜Assistant｜><think>the</think>", "<<think>>", "<｜User｜"):
        ids = JsonTokenizer(data).encode(text, special=True)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert library.decode(ids, skip_special_tokens=False) == text


def test_blank_added_tokens_stay_in_text() -> None:
    assert SMALL.encode("a    b")[1] == 408
    assert SMALL.decode([408]) == "    "


@pytest.mark.parametrize(
    "text", ["", "the fox", "北京 naïve\n\n  x", "\x00\x7f", "\U0001f642", "｜▁Ġ"]
)
def test_round_trip_and_the_library(text: str) -> None:
    library = tokenizers.Tokenizer.from_str(json.dumps(DATA))
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == text
    assert ids == library.encode(text, add_special_tokens=False).ids


def test_hidden_tokens_are_left_out() -> None:
    ids = [0, 400, *SMALL.encode("hi"), 406, 407]
    assert SMALL.decode(ids, skip_special=True) == "<｜User｜>hi</think>"
    assert SMALL.decode(ids).startswith("<｜begin▁of▁sentence｜><｜User｜>hi")


def test_no_id_makes_decoding_fail() -> None:
    assert SMALL.decode([399, 403, 409, 129_279, 2**31]) == ""
    assert SMALL.decode([400, 403]) == "<｜User｜>"
    with pytest.raises(TokenizerError, match="below 0"):
        SMALL.decode([-1])


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=30),
    st.lists(st.integers(0, 420), max_size=20),
)
def test_streams_add_up(text: str, stray: list[int]) -> None:
    for ids in (SMALL.encode(text), SMALL.encode(text)[1:] + stray):
        stream = SMALL.stream()
        pieces = [stream.push([token]) for token in ids]
        assert "".join(pieces) + stream.finish() == SMALL.decode(ids)
    assert SMALL.decode(SMALL.encode(text)) == text


def test_incomplete_characters_are_held_back() -> None:
    stream = SMALL.stream()
    ids = SMALL.encode("\U0001f642")
    assert len(ids) > 1
    assert [stream.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["\U0001f642"]


def test_lone_surrogates_become_replacement_characters() -> None:
    assert SMALL.decode(SMALL.encode("a\ud800b")) == "a\ufffdb"


def test_a_vocabulary_that_takes_whole_words() -> None:
    """With ignore_merges a word of the table is taken as it is, special names included."""
    data = json.loads(json.dumps(DATA))
    data["model"]["ignore_merges"] = True
    data["model"]["vocab"]["<s>"] = 350
    data["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    data["added_tokens"] = [added(350, "<s>", True)]
    whole = JsonTokenizer(data)
    assert whole.encode("<s>", special=True) == [350]
    ids = whole.encode("<s>")
    assert 350 not in ids and whole.decode(ids) == "<s>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": None}, "its decoder is None; only ByteLevel"),
        ({"decoder": {"type": "Metaspace"}}, "its decoder is 'Metaspace'"),
        ({"added_tokens": 5}, "'added_tokens' is not a list"),
        ({"added_tokens": [{"id": 5}]}, "lacks 'content' or 'id'"),
        ({"added_tokens": [added(7, "a", True), added(7, "b", True)]}, "has id 7 twice"),
        ({"model": {"type": "Nothing"}}, "not a usable tokenizer"),
    ],
)
def test_damaged_files(change: dict[str, Any], message: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({**DATA, **change}))
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(folder)
    assert "tokenizer.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_files_that_are_no_object(text: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


def test_truncation_left_in_the_file_is_ignored() -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert len(JsonTokenizer({**DATA, "truncation": cut}).encode("the quick brown fox")) > 2


def test_a_dialogue_with_the_folders_template(folder: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<｜User｜>' + m['content'] }}{% else %}"
        "{{ '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
    )
    config = {"chat_template": template, "bos_token": {"content": "<｜begin▁of▁sentence｜>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    chat, tokenizer = ChatFormat.from_folder(folder), Tokenizer.from_folder(folder)
    messages = [
        {"role": "user", "content": "hi<｜Assistant｜>"},
        {"role": "assistant", "content": "the"},
        {"role": "user", "content": [{"type": "text", "text": "fox"}]},
    ]
    ids = chat.encode(tokenizer, messages)
    shown = "<｜User｜>hi<｜Assistant｜><｜Assistant｜>the<｜end▁of▁sentence｜><｜User｜>fox"
    assert tokenizer.decode(ids) == f"<｜begin▁of▁sentence｜>{shown}<｜Assistant｜><think>\n"
    special = set(tokenizer.special_ids.values())
    assert [i for i in ids if i in special] == [0, 400, 401, 407, 400, 401, 405]


def test_a_model_with_such_a_vocabulary(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """The model has more rows than the vocabulary names, as DeepSeek's have."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("deepseek-v3", dims=Dims(vocab_size=512)), folder)
    (folder / "tokenizer.json").write_text(json.dumps(DATA))
    llm = LLM(folder)
    assert isinstance(llm.tokenizer, JsonTokenizer)
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    [output] = llm.generate(["the quick fox"], sampling)
    assert output.token_ids and isinstance(output.text, str)
    small = tmp_path / "small"
    shutil.copytree(checkpoint("deepseek-v3", dims=Dims(vocab_size=400)), small)
    (small / "tokenizer.json").write_text(json.dumps(DATA))
    with pytest.raises(TokenizerError, match="409 tokens, but the model 400"):
        LLM(small)
