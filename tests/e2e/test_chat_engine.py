"""`LLM.chat` on the packaged model and on small random ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoint_tools import CheckpointMaker
from tokenizers import decoders, models, pre_tokenizers

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.engine.build import packaged_model
from kdtree_engine.engine.chat import ChatMessage, TokenReader
from kdtree_engine.errors import CapacityError, KDTreeError, OptionError, TokenizerError
from kdtree_engine.tokenizer import ChatFormat, Tokenizer
from kdtree_engine.tokenizer.parse import (
    K2_THINKING,
    ChatParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu")


def test_the_packaged_model_answers(llm: LLM) -> None:
    answer = llm.chat([user("Hello")])
    assert answer.content == "Hello! How can I help you today?"
    assert (answer.finish_reason, answer.tool_calls) == ("stop", ())
    assert answer.output.finish_reason == "stop"
    again = llm.chat([user("Hello"), answer.to_dict(), user("Thanks!")])
    assert again.content and again.finish_reason == "stop"


def test_the_packaged_model_reasons(llm: LLM) -> None:
    """In some of its answers; in others it closes its reasoning at once."""
    question = [user("Write a Python function that reverses a string.")]
    params = [SamplingParams(temperature=0.7, seed=seed) for seed in range(6)]
    answers = [llm.chat(question, one) for one in params]
    assert any(answer.reasoning for answer in answers)
    assert all("think>" not in answer.reasoning + answer.content for answer in answers)
    assert all(llm.chat(question, one, thinking=False).reasoning == "" for one in params[:2])


def test_the_packaged_model_calls_a_tool(llm: LLM) -> None:
    question = user("What is the weather in Rome?")
    answer = llm.chat([question], tools=[WEATHER])
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.tool_calls
    assert (call.id, call.name) == ("functions.get_weather:0", "get_weather")
    assert json.loads(call.arguments)["city"] == "Rome"
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    closing = llm.chat([question, answer.to_dict(), result], tools=[WEATHER])
    assert closing.content and closing.finish_reason == "stop"


def test_the_stream_adds_up_to_the_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, seed=1)
    question = [user("What is the weather in Paris?")]
    whole = llm.chat(question, params, tools=[WEATHER])
    *deltas, last = llm.chat_stream(question, params, tools=[WEATHER])
    assert last.message is not None
    assert all(delta.message is None for delta in deltas)
    assert plain(last.message) == plain(whole)
    events = [event for delta in [*deltas, last] for event in delta.events]
    for kind, text in ((ContentDelta, whole.content), (ReasoningDelta, whole.reasoning)):
        assert "".join(event.text for event in events if isinstance(event, kind)) == text
    fragments = [event for event in events if isinstance(event, ToolCallArguments)]
    assert [call.arguments for call in whole.tool_calls] == ["".join(e.text for e in fragments)]
    ids = [token for delta in [*deltas, last] for token in delta.token_ids]
    assert ids == whole.output.token_ids


def plain(message: ChatMessage) -> tuple[object, ...]:
    return (message.content, message.reasoning, message.tool_calls, message.output.token_ids)


def test_an_answer_is_the_same_with_and_without_a_tree(llm: LLM) -> None:
    slow = LLM(device="cpu", tree_nodes=0)
    params = SamplingParams(temperature=0.7, seed=2)
    question = [user("What is the weather in Oslo?")]
    fast = llm.chat(question, params, tools=[WEATHER])
    assert plain(slow.chat(question, params, tools=[WEATHER])) == plain(fast)


def test_an_answer_cut_short(llm: LLM) -> None:
    question = [user("What is the weather in Rome?")]
    for most in range(1, 12):
        answer = llm.chat(question, SamplingParams(max_tokens=most), tools=[WEATHER])
        assert answer.finish_reason == "length"
        assert "<|" not in answer.content


def test_a_stop_token_is_not_part_of_the_answer(llm: LLM) -> None:
    assert llm.tokenizer is not None
    whole = llm.chat([user("Hello")])
    ids = whole.output.token_ids
    place = next(i for i, token in enumerate(ids) if "help" in llm.tokenizer.decode([token]))
    cut = llm.chat([user("Hello")], SamplingParams(stop_token_ids=[ids[place]]))
    assert cut.output.token_ids == ids[: place + 1]
    assert cut.content and whole.content.startswith(cut.content)
    assert "help" not in cut.content and cut.finish_reason == "stop"


def test_the_format_is_read_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    one_token = SamplingParams(max_tokens=1)
    prompts = [llm.chat([user("Hello")], one_token, family=name) for name in (None, "k2")]
    monkeypatch.setattr(ChatFormat, "from_folder", None)
    again = [llm.chat([user("Hello")], one_token, family=name) for name in (None, "k2")]
    tokens = [answer.output.prompt_tokens for answer in again]
    assert tokens == [answer.output.prompt_tokens for answer in prompts]
    assert tokens[0] != tokens[1]


def test_an_abandoned_stream_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.chat_stream([user("Hello")])
    next(stream)
    stream.close()
    assert not llm.engine.has_work


WRONG: list[tuple[type[KDTreeError], str, Callable[[LLM], object]]] = [
    (OptionError, "messages must be a list", lambda llm: llm.chat("Hello")),
    (OptionError, "messages is empty", lambda llm: llm.chat([])),
    (OptionError, "message 0 is no object", lambda llm: llm.chat(["Hello"])),
    (OptionError, "message 0 has the role None", lambda llm: llm.chat([{"content": "a"}])),
    (OptionError, "message 1 has the role 'bot'", lambda llm: llm.chat([user("a"), role("bot")])),
    (OptionError, "message 1 has the role \\[\\]", lambda llm: llm.chat([user("a"), role([])])),
    (OptionError, "tool_call_id 'x', but no", lambda llm: llm.chat([role("tool", "x")])),
    (OptionError, "tool_call_id \\[\\], but no", lambda llm: llm.chat([role("tool", [])])),
    (OptionError, "tool_calls must be a list", lambda llm: llm.chat([calling("x")])),
    (TokenizerError, "a 'function'", lambda llm: llm.chat([calling([{"id": "x"}])])),
    (TokenizerError, "content", lambda llm: llm.chat([{"role": "user", "content": 3}])),
    (TokenizerError, "image", lambda llm: llm.chat([image()])),
    (TokenizerError, "tools must be a list", lambda llm: llm.chat([user("a")], tools=3)),
    (TokenizerError, "family 'x' is not", lambda llm: llm.chat([user("a")], family="x")),
    (OptionError, "family \\[\\] must", lambda llm: llm.chat([user("a")], family=[])),
    (OptionError, "must be SamplingParams", lambda llm: llm.chat([user("a")], {"seed": 1})),
    (CapacityError, "positions end", lambda llm: llm.chat([user("a b " * 3000)])),
]


def role(name: object, answered: object = None) -> dict[str, Any]:
    return {"role": name, "content": "a", "tool_call_id": answered}


def calling(calls: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": calls}


def image() -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}


@pytest.mark.parametrize(("error", "message", "action"), WRONG)
def test_errors_speak_to_users(
    llm: LLM, error: type[KDTreeError], message: str, action: Callable[[LLM], object]
) -> None:
    with pytest.raises(error, match=message) as caught:
        action(llm)
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_work


def test_a_model_without_a_tokenizer_cannot_chat(checkpoint: CheckpointMaker) -> None:
    llm = LLM(checkpoint("k2.6"), drafter="none", device="cpu")
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        llm.chat([user("Hello")])


TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>\n{% endif %}{% endif %}"
)


def test_a_model_with_a_template_of_its_own(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """tokenizer.json and chat_template beside random weights: what it says means nothing."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("deepseek-v3", dims=Dims(vocab_size=320)), folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    names = ["<|user|>", "<|assistant|>", "<think>", "</think>"]
    library.add_special_tokens(names)
    library.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    llm = LLM(folder, drafter="none", device="cpu")
    assert llm.tokenizer is not None
    ids = llm.tokenizer.special_ids
    params = SamplingParams(
        max_tokens=60, temperature=1.0, seed=1, stop_token_ids=[ids["<|user|>"]]
    )
    answer = llm.chat([user("Hello </think>")], params)
    assert answer.output.prompt_tokens == len("Hello </think>") + 4  # 3 marks and a newline
    assert answer.reasoning and (not answer.content or ids["</think>"] in answer.output.token_ids)
    assert "<think>" not in answer.reasoning
    straight = llm.chat([user("Hello")], params, thinking=False)
    assert straight.content and (
        not straight.reasoning or ids["<think>"] in straight.output.token_ids
    )


# Tokens to events.


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(packaged_model() / "target")


def read(tokenizer: Tokenizer, ids: list[int], size: int) -> list[str]:
    reader = TokenReader(tokenizer, K2_THINKING, ChatParser(reasoning=True))
    events = [
        event for at in range(0, len(ids), size) for event in reader.push(ids[at : at + size])
    ]
    kinds: dict[str, str] = {}
    for event in [*events, *reader.finish()]:
        if isinstance(event, ReasoningDelta | ContentDelta | ToolCallArguments):
            name = type(event).__name__
            kinds[name] = kinds.get(name, "") + event.text
    return [
        kinds.get(kind.__name__, "") for kind in (ReasoningDelta, ContentDelta, ToolCallArguments)
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_markers_are_tokens_where_the_vocabulary_has_them(tokenizer: Tokenizer, size: int) -> None:
    """A model that writes this very project's source must not end its own call."""
    names = "</think> <|tool_call_end|> <|im_end|> é日"
    ids = tokenizer.encode(f"a{names}") + tokenizer.encode("</think>", special=True)
    ids += tokenizer.encode(f"b{names}")
    ids += tokenizer.encode("<|tool_call_begin|>functions.f:0", special=True)
    ids += tokenizer.encode("<|tool_call_argument_begin|>", special=True)
    ids += tokenizer.encode(f"c{names}") + tokenizer.encode("<|im_end|>d", special=True)
    assert read(tokenizer, ids, size) == [f"a{names}", f"b{names}", f"c{names}"]


def test_other_control_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a[EOS]b<|im_user|>c<|reserved_token_2900|>", special=True)
    assert read(tokenizer, ids, 1000)[0] == "abc"


def test_half_a_character_before_a_marker(tokenizer: Tokenizer) -> None:
    half = [token for token in range(256) if tokenizer.token_bytes(token) == b"\xc3"]
    ids = half + [tokenizer.special_ids["</think>"]] + tokenizer.encode("b")
    assert read(tokenizer, ids, 1)[:2] == ["\ufffd", "b"]


def test_markers_are_text_where_the_vocabulary_has_no_tokens(tmp_path: Path) -> None:
    """An older K2 vocabulary ends before the thinking markers."""
    source = packaged_model() / "target"
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    table = config["added_tokens_decoder"]
    for slot in [slot for slot, entry in table.items() if "think" in entry["content"]]:
        del table[slot]
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert "</think>" not in tokenizer.special_ids
    ids = tokenizer.encode("<think>a</think>b<|im_end|>c", special=True)
    assert read(tokenizer, ids, 1)[:2] == ["a", "b"]
