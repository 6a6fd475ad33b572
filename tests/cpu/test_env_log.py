"""Environment variables, logging and progress."""

from __future__ import annotations

import io
import logging

import pytest

from kdtree_engine import log
from kdtree_engine.env import Environment, read_environment
from kdtree_engine.errors import OptionError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_unset_and_empty_variables_are_the_defaults() -> None:
    assert read_environment({}) == Environment()
    assert read_environment({"KDTREE_LOG": "", "KDTREE_THREADS": ""}) == Environment()


def test_set_variables() -> None:
    found = read_environment({"KDTREE_LOG": "Debug", "KDTREE_THREADS": "2"})
    assert found == Environment(log_level="debug", threads=2)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "two", "1025", "²", " 2", "9" * 5000])
def test_bad_thread_counts_name_the_variable(value: str) -> None:
    with pytest.raises(OptionError, match="KDTREE_THREADS") as caught:
        read_environment({"KDTREE_THREADS": value})
    assert len(str(caught.value)) < 200


def test_messages_go_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    log.configure("info")
    logging.getLogger("kdtree_engine.engine").info("loaded")
    logging.getLogger("kdtree_engine.engine").debug("hidden")
    assert capsys.readouterr() == ("", "kdtree: INFO: loaded\n")


def test_short_work_is_silent() -> None:
    for stream in (io.StringIO(), Terminal()):
        clock = Clock()
        with log.progress("loading", 3, stream=stream, clock=clock) as meter:
            for _ in range(3):
                clock.now += 0.5
                meter.advance()
        assert stream.getvalue() == ""


def test_plain_lines_are_rare_and_say_how_it_ended() -> None:
    stream, clock = io.StringIO(), Clock()
    with log.progress("loading", 40, stream=stream, clock=clock) as meter:
        for at in range(40):
            clock.now += 1
            meter.advance(note=f"layer {at}")
    assert stream.getvalue().splitlines() == [
        "loading: 2/40, 2 s, layer 1",
        "loading: 12/40, 12 s, layer 11",
        "loading: 22/40, 22 s, layer 21",
        "loading: 32/40, 32 s, layer 31",
        "loading: 40/40, 40 s, layer 39",
    ]


def test_an_unknown_total_counts_up() -> None:
    stream, clock = io.StringIO(), Clock()
    with log.progress("reading", stream=stream, clock=clock) as meter:
        clock.now += 3
        meter.advance(5)
    assert stream.getvalue() == "reading: 5, 3 s\n"


def test_a_terminal_gets_a_bar_after_two_seconds() -> None:
    stream, clock = Terminal(), Clock()
    with log.progress("loading", 4, stream=stream, clock=clock) as meter:
        clock.now += 1
        meter.advance()
        assert stream.getvalue() == ""
        clock.now += 1.5
        meter.advance()
    assert "loading" in stream.getvalue()
    assert "2/4" in stream.getvalue()


def test_progress_that_is_not_shown() -> None:
    stream, clock = Terminal(), Clock()
    with log.progress("loading", 4, shown=False, stream=stream, clock=clock) as meter:
        clock.now += 100
        meter.advance()
    assert stream.getvalue() == ""
