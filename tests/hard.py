"""What the tests of hard input share: odd values, and the check that only our own errors come."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.errors import LONGEST, KDTreeError

Result = TypeVar("Result")

CPU_SECONDS = 2.0
WALL_SECONDS = 60  # a call that waits for ever, as for a pipe's writer, uses no CPU


def examples(count: int) -> settings:
    """So many examples, the same ones at every run."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def outcome(call: Callable[[], Result]) -> Result | KDTreeError:
    """What a call returns, or the error of ours that it raises: one line, soon."""

    def stuck(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"still not done after {WALL_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(WALL_SECONDS)
    started = time.process_time()
    result: Result | KDTreeError
    try:
        result = call()
    except KDTreeError as error:
        message = str(error)
        assert message and message.isprintable(), repr(message)
        assert len(message) <= LONGEST
        result = error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - started < CPU_SECONDS
    return result


def refused(call: Callable[[], Any]) -> KDTreeError:
    """The error of ours that a call must raise."""
    result = outcome(call)
    assert isinstance(result, KDTreeError), result
    return result


def computes(folder: Path, **options: Any) -> None:
    """A model that loads gives tokens, or says that its logits are not finite."""
    llm = LLM(folder, device="cpu", cache_pages=4, max_requests=1, **options)
    [out] = llm.generate([1, 2, 3], SamplingParams(max_tokens=3))
    llm.engine.check_integrity()
    if out.finish_reason == "error":
        assert out.error is not None and "not finite" in out.error
    else:
        assert out.finish_reason in ("length", "stop") and out.token_ids


DEEP = 100_000
ODD_JSON = (
    "null", "true", "false", "0", "1", "2", "3", "7", "-1", "64", "4096", "2147483647",
    "2147483648", "9223372036854775808", "1000000000000", "-1000000000000", "1" * 400, "9" * 5000,
    "0.0", "0.5", "-0.5", "1e-320", "1e39", "1e299", "1e400", "-1e400", "NaN", "Infinity",
    '""', '"x"', '"\\ud800"', '"a\\nb\\u001b[31m"', '"\\u0000"', '"../x"',
    json.dumps("y" * 100_000),
    "[]", "[1]", "[-1, 1]", "[null]", "[[]]", "[0, 0]", "[1e400]", '["x", "x"]', "{}", '{"": 1}',
    '{"a": {"a": null}}', "[" * 900 + "]" * 900, "[" * DEEP + "]" * DEEP, "[" * DEEP,
)  # fmt: skip
"""Fragments of JSON text, the last one broken."""

DELETE, TWICE = "delete", "twice"
Path_ = tuple[str | int, ...]


def paths(data: Any, prefix: Path_ = ()) -> Iterator[Path_]:
    """Where values stand in a JSON value, objects and lists themselves included."""
    members: Any = ()
    if isinstance(data, dict):
        members = data.items()
    elif isinstance(data, list):
        members = enumerate(data)
    for key, value in members:
        yield (*prefix, key)
        yield from paths(value, (*prefix, key))


def changed(data: Any, edits: list[tuple[Path_, str]]) -> str:
    """JSON text of `data` with fragments instead of some values; later edits win.

    The fragment DELETE takes the key out; TWICE says it twice, the second time as null.
    """
    copy = json.loads(json.dumps(data))
    fragments: dict[str, str] = {}
    for number, (path, fragment) in enumerate(edits):
        place = copy
        for key in path[:-1]:
            holds = isinstance(place, dict) and key in place
            holds |= isinstance(place, list) and isinstance(key, int) and key < len(place)
            place = place[key] if holds else None
        key = path[-1]
        if isinstance(place, dict):
            place.pop(key, None)
            if fragment == DELETE:
                continue
            mark = f"@{number}@"
            place[key] = mark
            again = f"null, {json.dumps(key)}: null"
            fragments[json.dumps(mark)] = again if fragment == TWICE else fragment
        elif isinstance(place, list) and isinstance(key, int) and key < len(place):
            mark = f"@{number}@"
            place[key] = mark
            fragments[json.dumps(mark)] = "null" if fragment in (DELETE, TWICE) else fragment
    text = json.dumps(copy)
    for mark, fragment in fragments.items():
        text = text.replace(mark, fragment)
    return text


def edits_of(data: Any, most: int = 3) -> st.SearchStrategy[list[tuple[Path_, str]]]:
    """Some changes of a JSON value, unknown keys among them."""
    where = [*paths(data), ("unknown_key",)]
    fragment = st.sampled_from((*ODD_JSON, DELETE, TWICE))
    return st.lists(st.tuples(st.sampled_from(where), fragment), min_size=1, max_size=most)


def rewrite(path: Path, data: bytes | str) -> None:
    """New content in a new file: the old one may still be mapped."""
    path.unlink(missing_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
