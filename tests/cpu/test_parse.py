"""The parser of a model's output: the grammar, what models make of it, any cut, and its time."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine.tokenizer.parse import (
    K2,
    K2_THINKING,
    PLAIN,
    ChatEvent,
    ChatParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    output_grammar,
)

THINK, NO_THINK = "<think>", "</think>"
SECTION, NO_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGS, NO_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
END = "<|im_end|>"
MARKERS = (THINK, NO_THINK, SECTION, NO_SECTION, CALL, ARGS, NO_CALL, END)


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""
    ended: bool = False


@dataclass
class Answer:
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[ChatEvent]) -> None:
        for event in events:
            match event:
                case ReasoningDelta(text):
                    assert text
                    self.reasoning += text
                case ContentDelta(text):
                    assert text
                    self.content += text
                case ToolCallBegin(index, id, name):
                    assert index == len(self.calls)
                    self.calls.append(Call(id, name))
                case ToolCallArguments(index, text):
                    assert text and index == len(self.calls) - 1 and not self.calls[-1].ended
                    self.calls[-1].arguments += text
                case ToolCallEnd(index):
                    assert index == len(self.calls) - 1 and not self.calls[-1].ended
                    self.calls[-1].ended = True


def parse(pieces: str | Sequence[str], parser: ChatParser | None = None) -> Answer:
    parser = parser or ChatParser(reasoning=True)
    answer = Answer()
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    assert all(call.ended for call in answer.calls)
    return answer


def call(header: str, arguments: str = "{}") -> str:
    return f"{CALL}{header}{ARGS}{arguments}{NO_CALL}"


def calls(text: str) -> list[tuple[str, str, str]]:
    return [(one.id, one.name, one.arguments) for one in parse(text).calls]


def test_an_answer_as_the_grammar_has_it() -> None:
    text = (
        f"I need both.{NO_THINK}Let me look.{SECTION}"
        + call("functions.get_weather:0", '{"city": "Rome"}')
        + call("functions.fs.read-file:1", '{"path": "a"}')
        + f"{NO_SECTION}{END}"
    )
    answer = parse(text)
    assert answer.reasoning == "I need both."
    assert answer.content == "Let me look."
    assert answer.calls == [
        Call("functions.get_weather:0", "get_weather", '{"city": "Rome"}', True),
        Call("functions.fs.read-file:1", "fs.read-file", '{"path": "a"}', True),
    ]


def test_whitespace_of_reasoning_and_content_is_the_models_own() -> None:
    answer = parse(f"\n a \n{NO_THINK}\n\n b \n{SECTION}")
    assert (answer.reasoning, answer.content) == ("\n a \n", "\n\n b \n")


def test_where_an_answer_begins() -> None:
    assert parse("a", ChatParser()).content == "a"
    assert parse("a", ChatParser(reasoning=True)).reasoning == "a"
    # K2-Thinking opens its reasoning itself; K2.5, whose prompt does, may open it once more.
    for inside in (False, True):
        answer = parse(f"{THINK}a{NO_THINK}b", ChatParser(reasoning=inside))
        assert (answer.reasoning, answer.content) == ("a", "b")
    # Reasoning was switched off, and the model closes it again.
    assert parse(f"{NO_THINK}b", ChatParser()).content == "b"


def test_families() -> None:
    assert output_grammar("k2") is K2
    for family in ("k2-thinking", "k2.5", "k2.6"):
        assert output_grammar(family) is K2_THINKING
    assert output_grammar("deepseek") is PLAIN
    # K2 has no thinking markers, and DeepSeek's tool markers are not Kimi's: text, both.
    assert parse(f"a{THINK}b{END}c", ChatParser(K2)).content == f"a{THINK}b"
    plain = parse(
        f"{THINK}a{NO_THINK}b{CALL}<\uff5cend\u2581of\u2581sentence\uff5c>c", ChatParser(PLAIN)
    )
    assert (plain.reasoning, plain.content) == ("a", f"b{CALL}")


def test_the_end_marker_ends_the_message() -> None:
    parser = ChatParser()
    assert parser.push(f"a{END}b") == [ContentDelta("a")]
    assert parser.ended
    assert parser.push(f"c{call('functions.f:0')}") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("header", "id", "name"),
    [
        ("functions.f:0", "functions.f:0", "f"),
        ("functions.f:17", "functions.f:17", "f"),
        (" functions.f:0\n", "functions.f:0", "f"),
        ("\nfunctions.a.b-c:2", "functions.a.b-c:2", "a.b-c"),
        ("f:0", "functions.f:5", "f"),
        ("functions.f", "functions.f:5", "f"),
        ("f", "functions.f:5", "f"),
        ("functions.f : 0", "functions.f:5", "f"),
        ("functions.f:x", "functions.f:x:5", "f:x"),
        ("functions.f:٣", "functions.f:٣:5", "f:٣"),
        ("call_Ab12", "functions.call_Ab12:5", "call_Ab12"),
        ("0", "functions.0:5", "0"),
    ],
)
def test_ids_as_models_write_them(header: str, id: str, name: str) -> None:
    answer = parse(call(header), ChatParser(first_call=5))
    assert [(one.id, one.name) for one in answer.calls] == [(id, name)]


@pytest.mark.parametrize("header", ["0", ":0", "functions.:0", " 12 "])
def test_a_bare_number_is_the_only_tool_there_is(header: str) -> None:
    answer = parse(call(header), ChatParser(tool_names=["f"]))
    assert [(one.id, one.name) for one in answer.calls] == [("functions.f:0", "f")]
    two = parse(call(header), ChatParser(tool_names=["f", "g"]))
    assert [one.name for one in two.calls] == [header.strip()]


def test_ids_of_an_answer_differ() -> None:
    text = call("functions.f:0") * 2 + call("functions.f:3") + call("f") * 2
    ids = [id for id, _, _ in calls(text)]
    assert len(set(ids)) == 5
    assert ids[:3] == ["functions.f:0", "functions.f:1", "functions.f:3"]


ONE = [("functions.f:0", "f", '{"a": 1}')]
HEAD = f"{CALL}functions.f:0{ARGS}" + '{"a": 1}'


@pytest.mark.parametrize(
    "text",
    [
        f"{NO_THINK}{HEAD}{NO_CALL}",  # no section
        f"{NO_THINK}{SECTION}{HEAD}{NO_CALL}",  # no end of the section
        f"{NO_THINK}{SECTION}{HEAD}{NO_SECTION}",  # no end of the call
        f"{NO_THINK}{SECTION}{HEAD}{END}",
        f"{NO_THINK}{SECTION}{HEAD}",
        f"{SECTION}{HEAD}{NO_CALL}{NO_SECTION}",  # reasoning not ended
        f"{HEAD}{NO_CALL}",
        f"{SECTION}\n {HEAD}{NO_CALL} \n{NO_SECTION}\n{END}",  # whitespace
        f"{SECTION}{SECTION}{HEAD}{NO_CALL}{NO_CALL}{NO_SECTION}{NO_SECTION}",  # doubled
        f"{SECTION}{NO_SECTION}{SECTION}{HEAD}{NO_CALL}{NO_SECTION}",  # a section without calls
        f"{SECTION}{CALL}{NO_CALL}{CALL} {HEAD}{NO_CALL}",  # empty calls
        f'{SECTION}{CALL}functions.f:0 {{"a": 1}}{NO_CALL}{NO_SECTION}',  # no arguments marker
        f"{NO_CALL}{NO_SECTION}{ARGS}{HEAD}{NO_CALL}",  # ends of nothing
    ],
)
def test_a_call_is_found_whatever_is_round_it(text: str) -> None:
    assert calls(text) == ONE
    answer = parse(text)
    assert (answer.reasoning, answer.content) == ("", "")


def test_calls_follow_each_other_without_an_end() -> None:
    second = HEAD.replace("f:0", "g:1")
    assert calls(f"{SECTION}{HEAD}{second}{NO_SECTION}") == [
        *ONE,
        ("functions.g:1", "g", '{"a": 1}'),
    ]


def test_text_in_and_after_a_section_is_content() -> None:
    first, second = (f"{HEAD}{NO_CALL}" for _ in range(2))
    text = f"r{NO_THINK}a {SECTION}\n one two\n{first}\nthree{second}{NO_SECTION}\n end.\n"
    for pieces in (text, list(text)):
        answer = parse(pieces)
        assert answer.content == "a one twothreeend."
        assert len(answer.calls) == 2


def test_a_section_inside_reasoning_ends_it() -> None:
    answer = parse(f"so{SECTION}{HEAD}{NO_CALL}{NO_SECTION}{NO_THINK}done")
    assert (answer.reasoning, answer.content) == ("so", "done")
    assert len(answer.calls) == 1


@pytest.mark.parametrize("arguments", ["", "not json", "{'a': 1}", '{"a": 1', "[1]", "\n{}\n"])
def test_arguments_are_passed_on_unread(arguments: str) -> None:
    assert calls(call("functions.f:0", arguments))[0][2] == arguments


def test_arguments_hold_what_they_like() -> None:
    """Half markers, thinking markers and a second arguments marker are part of them."""
    text = f'{{"code": "<|tool_call_en <think>{THINK} {NO_THINK} {ARGS} < <| \\" }} <|im_en"}}'
    assert calls(call("functions.f:0", text))[0][2] == text


def test_literal_text_holds_no_markers() -> None:
    """A vocabulary that has tokens for the markers knows the markers from their names."""
    source = f'{{"text": "{NO_CALL}{END}{SECTION}"}}'
    parser = ChatParser(reasoning=True)
    answer = Answer()
    answer.add(parser.push(f"write {NO_THINK}", literal=True))
    for text in (NO_THINK, CALL, "functions.f:0", ARGS):
        answer.add(parser.push(text))
    for part in (source[:20], source[20:]):
        answer.add(parser.push(part, literal=True))
    answer.add(parser.push(NO_CALL))
    answer.add(parser.finish())
    assert answer.reasoning == f"write {NO_THINK}"
    assert answer.calls == [Call("functions.f:0", "f", source, True)]


def test_a_call_cut_inside_its_id_is_left_out() -> None:
    for text in (f"{SECTION}{CALL}functions.get_w", f"{SECTION}{CALL}", f"{SECTION}<|tool_call_be"):
        assert parse(text).calls == []
    assert calls(f"{CALL}functions.f:0{ARGS}" + '{"a') == [("functions.f:0", "f", '{"a')]


def test_a_call_that_a_stop_token_ends_is_a_call() -> None:
    parser = ChatParser()
    parser.push('<|tool_call_begin|>functions.f:0{"a": 1}')
    assert parser.finish(cut=False) == [
        ToolCallBegin(0, "functions.f:0", "f"),
        ToolCallArguments(0, '{"a": 1}'),
        ToolCallEnd(0),
    ]


def test_partial_markers_are_held_back_and_released() -> None:
    parser = ChatParser()
    assert parser.push("a<|im") == [ContentDelta("a")]
    assert parser.push("_en") == []
    assert parser.push("x") == [ContentDelta("<|im_enx")]
    assert parser.push("<<") == [ContentDelta("<")]
    assert parser.push("|im_end|") == []
    assert parser.finish() == [ContentDelta("<|im_end|")]


def test_arguments_arrive_as_fragments() -> None:
    parser = ChatParser()
    events = parser.push(f"{CALL}functions.f:0{ARGS}")
    assert events == [ToolCallBegin(0, "functions.f:0", "f")]
    assert parser.push('{"a"') == [ToolCallArguments(0, '{"a"')]
    assert parser.push(": 1}<|tool") == [ToolCallArguments(0, ": 1}")]
    assert parser.push("_call_end|>") == [ToolCallEnd(0)]


def test_several_markers_in_one_delta() -> None:
    """A step of a speculating engine may bring the end of a call and the next one's beginning."""
    parser = ChatParser()
    parser.push(f"{CALL}functions.f:0{ARGS}" + '{"a": ')
    assert parser.push(f"1}}{NO_CALL}{CALL}functions.g:1{ARGS}{{") == [
        ToolCallArguments(0, "1}"),
        ToolCallEnd(0),
        ToolCallBegin(1, "functions.g:1", "g"),
        ToolCallArguments(1, "{"),
    ]


# Properties. Pieces that make ill-formed outputs: markers, their halves, ids, whitespace, words.

HALVES = tuple({marker[:n] for marker in MARKERS for n in (1, 2, 5, len(marker) - 1)})
WORDS = ("functions.f:0", "g:1", "3", "{", '{"a": 1}', "word", "é", " ", "\n", ">", "|>", "think>")
outputs = st.lists(st.sampled_from(MARKERS + HALVES + WORDS), max_size=14).map("".join)
parsers = st.builds(
    lambda *options: lambda: ChatParser(*options),
    st.sampled_from([K2, K2_THINKING, PLAIN]),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([(), ("f",), ("f", "g")]),
)


@settings(max_examples=300, deadline=None)
@given(outputs, parsers)
def test_any_cut_in_two_gives_the_same(text: str, make: Callable[[], ChatParser]) -> None:
    whole = parse(text, make())
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]], make()) == whole
    assert parse(list(text), make()) == whole


@settings(max_examples=300, deadline=None)
@given(outputs, parsers, st.data())
def test_any_cut_in_many_gives_the_same(
    text: str, make: Callable[[], ChatParser], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, make()) == parse(text, make())


@settings(max_examples=300, deadline=None)
@given(outputs)
def test_no_whole_marker_is_ever_shown(text: str) -> None:
    """Not in reasoning and not in content, where no reader expects one."""
    parser = ChatParser(reasoning=True)
    # Event by event: where a marker is left out, what stands before and after it may look like one.
    for event in [*parser.push(text), *parser.finish()]:
        if isinstance(event, ReasoningDelta | ContentDelta):
            assert not any(marker in event.text for marker in MARKERS)


prose = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
names = st.from_regex(r"[a-z][a-z0-9_.-]{0,10}", fullmatch=True)
values = st.recursive(
    st.integers() | st.text(max_size=8), lambda inner: st.lists(inner), max_leaves=4
)
arguments = st.dictionaries(st.text(max_size=5), values, max_size=3).map(json.dumps)


@settings(max_examples=200, deadline=None)
@given(prose, prose, st.lists(st.tuples(names, arguments), max_size=4), st.data())
def test_what_was_written_is_read(
    reasoning: str, content: str, called: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Answers written by the grammar come back as they were, cut anywhere."""
    text = f"{reasoning}{NO_THINK}{content}"
    if called:
        text += SECTION
        text += "".join(call(f"functions.{n}:{i}", a) for i, (n, a) in enumerate(called))
        text += NO_SECTION
    at = data.draw(st.integers(0, len(text)))
    answer = parse([text[:at], text[at:], END])
    assert (answer.reasoning, answer.content) == (reasoning, content)
    expected = [Call(f"functions.{n}:{i}", n, a, True) for i, (n, a) in enumerate(called)]
    assert answer.calls == expected


# Time. Linear work doubles with the text; quadratic work would take the square.

UNITS = [
    *MARKERS[:-1],
    "<",
    "</",
    "\n",
    "a ",
    f"{CALL}f{ARGS}",
    f"{CALL}functions.f:9{ARGS}",
    f"{CALL}{{",
    f"{SECTION} x ",
    *(marker[:-1] for marker in MARKERS),
]
SMALL, FACTOR = 1 << 16, 8


def seconds(text: str, piece: int) -> float:
    """This thread's own time, without the collector, which walks what other tests left."""
    parser = ChatParser(tool_names=["f"])
    gc.disable()
    start = time.thread_time()
    for at in range(0, len(text), piece):
        parser.push(text[at : at + piece])
    parser.finish()
    taken = time.thread_time() - start
    gc.enable()
    return taken


@pytest.mark.parametrize("opening", ["", SECTION, CALL, f"{CALL}f{ARGS}"])
def test_time_is_linear(opening: str) -> None:
    for unit in UNITS:
        for piece in (7, 1 << 30):
            size = SMALL if piece > 7 else SMALL // 8
            short, long = (opening + unit * (n // len(unit)) for n in (size, size * FACTOR))
            quick = min(seconds(short, piece) for _ in range(2))
            # Three times the linear share, and 20 ms for what a busy machine does in between.
            assert seconds(long, piece) < 3 * FACTOR * quick + 0.02, (unit, piece)


def test_ids_made_to_collide_take_linear_time() -> None:
    """Half of the calls take the numbers that the other half would get."""

    def text(n: int) -> str:
        return "".join(call(f"functions.f:{i}") for i in range(n, 2 * n)) + call("f") * n

    assert len(parse(text(2000)).calls) == 4000
    quick = min(seconds(text(1000), 1 << 30) for _ in range(2))
    assert seconds(text(1000 * FACTOR), 1 << 30) < 3 * FACTOR * quick + 0.02


def test_megabytes_of_every_prefix_take_seconds() -> None:
    prefixes = "".join(marker[:n] for marker in MARKERS for n in range(1, len(marker) + 1))
    prefixes = prefixes.replace(END, "")
    text = prefixes * (2_000_000 // len(prefixes))
    assert seconds(text, 1 << 30) < 20
