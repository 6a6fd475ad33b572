"""`kdtree chat` over a scripted model: through pipes, on a pseudo-terminal, and interrupted."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted_chat
from scripted_chat import ScriptedLLM

from kdtree_engine import cli
from kdtree_engine.cli.screen import _STEERING
from kdtree_engine.errors import CapacityError
from kdtree_engine.tokenizer.parse import (
    ChatEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

HELLO = [[ReasoningDelta("A greeting")], [ReasoningDelta(".\n"), ContentDelta("Hel")]]
HELLO += [[ContentDelta("lo!")]]
CALL = [[ToolCallBegin(0, "functions.f:0", "f"), ToolCallArguments(0, '{"a":'), ToolCallEnd(0)]]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C means something, also where a shell ran the tests in its background, which ignores
    it and hands that on.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def talk(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    llm: ScriptedLLM,
    *lines: str,
    options: tuple[str, ...] = (),
) -> tuple[int, str, str]:
    scripted_chat.install(llm, monkeypatch)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code = cli.run(["chat", *options])
    return (code, *capsys.readouterr())


def test_answers_go_to_stdout_and_the_rest_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(HELLO, [[ContentDelta("Bye.")]])
    code, out, err = talk(monkeypatch, capsys, llm, "hi", "", "  bye  ", "/stats", "/exit", "no")
    assert (code, out) == (0, "Hello!\nBye.\n")
    assert "\x1b" not in out + err and "> " not in err  # nothing that only a terminal wants
    lines = err.splitlines()
    assert lines[:2] == ["kdtree: skipped 23 vision tensors", "A greeting."]
    found = r"kdtree: last answer: prompt 5 tokens, 0 of them cached; 2 tokens in 1 steps, .*"
    assert re.fullmatch(found + r"ended by stop; all 2 that ended: 8 tokens in 4 steps", lines[-1])
    assert [message["content"] for message in llm.asked[1]] == ["hi", "Hello!", "bye"]
    assert llm.asked[1][1]["reasoning_content"] == "A greeting.\n"


def test_options_reach_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(HELLO)
    options = ("--system", "Be brief.", "--no-thinking", "--family", "k2.6", "--max-tokens", "9")
    options += ("--temperature", "0.7", "--seed", "3", "--top-p", "0.9")
    assert talk(monkeypatch, capsys, llm, "hi", options=options)[0] == 0
    assert llm.asked[0][0] == {"role": "system", "content": "Be brief."}
    assert llm.options == {"thinking": False, "family": "k2.6"}
    params = llm.params
    assert (params.max_tokens, params.temperature, params.seed) == (9, 0.7, 3)
    assert params.top_p == 0.9


def test_reset_forgets_all_but_the_system_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(HELLO, HELLO)
    talk(monkeypatch, capsys, llm, "hi", "/reset", "again", options=("--system", "s"))
    assert [message["content"] for message in llm.asked[1]] == ["s", "again"]


def test_commands_are_not_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(HELLO, HELLO)
    _, _, err = talk(monkeypatch, capsys, llm, "/stats", "/help", "/usr/bin is a path", "/ too")
    assert "no answer yet" in err and "/help is no command: /reset" in err
    assert [asked[-1]["content"] for asked in llm.asked] == ["/usr/bin is a path", "/ too"]


def test_tool_calls_are_shown_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM([[ContentDelta("Look.")], *CALL], HELLO)
    _, out, err = talk(monkeypatch, capsys, llm, "hi", "more")
    assert out == "Look.\nHello!\n"
    assert 'calls f {"a":\n' in err
    assert llm.asked[1][1]["tool_calls"][0]["id"] == "functions.f:0"


def test_an_answer_that_was_cut_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(HELLO, finish_reason="length")
    assert "see --max-tokens" in talk(monkeypatch, capsys, llm, "hi")[2]


def test_a_failure_ends_a_script_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(CapacityError("too long"), HELLO)
    code, out, err = talk(monkeypatch, capsys, llm, "hi", "more")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "kdtree: too long"
    broken = ScriptedLLM(HELLO, finish_reason="error")
    code, _, err = talk(monkeypatch, capsys, broken, "hi", "more")
    assert code == 1 and err.splitlines()[-1] == "kdtree: the model broke"


def test_input_that_is_no_text_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted_chat.install(ScriptedLLM(), monkeypatch)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    assert cli.run(["chat"]) == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err


def interrupted(pieces: str, times: int = 1) -> Iterator[list[ChatEvent]]:
    """An answer during which Ctrl-C is pressed, in the middle of a step."""
    for piece in pieces:
        yield [ContentDelta(piece)]
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    yield [ContentDelta("!")]
    raise AssertionError("a step was made after the interrupt")


class Typed(io.StringIO):
    """Lines that somebody types."""

    def isatty(self) -> bool:
        return True


def test_a_stopped_answer_stays_as_far_as_it_went(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = scripted_chat.install(ScriptedLLM(interrupted("abc"), HELLO), monkeypatch)
    monkeypatch.setattr("sys.stdin", Typed("hi\nmore\n"))
    assert cli.run(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "abc!\nHello!\n" and "kdtree: stopped\n" in err
    assert [message["content"] for message in llm.asked[1]] == ["hi", "abc!", "more"]


def test_a_question_goes_where_the_answer_had_not_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def thinking() -> Iterator[list[ChatEvent]]:
        signal.raise_signal(signal.SIGINT)
        yield [ReasoningDelta("Hm")]
        raise AssertionError

    llm = scripted_chat.install(ScriptedLLM(thinking(), HELLO), monkeypatch)
    monkeypatch.setattr("sys.stdin", Typed("hi\nmore\n"))
    assert cli.run(["chat"]) == 0
    assert [message["content"] for message in llm.asked[1]] == ["more"]


def test_two_interrupts_end_the_program_and_one_ends_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    for lines, times in ((Typed("hi\nmore\n"), 2), (io.StringIO("hi\nmore\n"), 1)):
        scripted_chat.install(ScriptedLLM(interrupted("abc", times), HELLO), monkeypatch)
        monkeypatch.setattr("sys.stdin", lines)
        assert cli.run(["chat"]) == 130
        assert signal.getsignal(signal.SIGINT) is before


def test_a_failure_does_not_end_a_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = scripted_chat.install(ScriptedLLM(CapacityError("too long"), HELLO), monkeypatch)
    monkeypatch.setattr("sys.stdin", Typed("hi\nmore\n"))
    assert cli.run(["chat"]) == 0
    assert "too long (the question is forgotten" in capsys.readouterr().err
    assert [message["content"] for message in llm.asked[1]] == ["more"]


def test_a_model_cannot_steer_the_terminal() -> None:
    assert "a\x1b[2J\r\x9b\tb\n".translate(_STEERING) == "a\ufffd[2J\ufffd\ufffd\tb\n"


# On a pseudo-terminal, in a process of its own.


class Session:
    """The command on a terminal, over the model that never stops talking."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        root = Path(__file__).parents[1]
        source = Path(cli.__file__).parents[2]
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": f"{source}:{root}"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, str(root / "scripted_chat.py")],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str, seconds: float = 60.0) -> str:
        """Read until something new matches; returns what was read on the way."""
        start, end = len(self.text), time.monotonic() + seconds
        while not re.search(pattern, self.text[start:]):
            assert time.monotonic() < end, f"no {pattern!r} in {self.text[start:]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self.text += os.read(self._master, 65536).decode(errors="replace")
        return self.text[start:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def session() -> Iterator[Session]:
    one = Session()
    yield one
    one.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(session: Session) -> None:
    session.until("> ")
    assert "/reset forgets" in session.text and "\x1b[2m" in session.text  # notes are dim
    session.type("hi\n")
    session.until("word3 ")
    session.process.send_signal(signal.SIGINT)
    session.until("stopped(.|\n)*> ")
    assert session.process.poll() is None
    session.type("more\n")
    session.until("second answer(.|\n)*> ")
    # Python's readline shows the prompt a moment before it waits for keys, and a signal in between
    # takes effect at the next key only: nobody is that fast, but this test is.
    time.sleep(1.0)
    session.process.send_signal(signal.SIGINT)  # at the prompt: the line is dropped
    session.until("> ")
    session.type("/stats\n")
    session.until("all 1 that ended: 2 tokens in 1 steps")
    session.type("\x04")
    assert session.process.wait(30) == 0
