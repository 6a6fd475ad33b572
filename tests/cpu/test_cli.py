"""The command line over a scripted engine: what is printed where, exit codes, one-line errors."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from traces import FORKED, WORDS

from kdtree_engine import cli
from kdtree_engine.cli.generate import Speed
from kdtree_engine.errors import CheckpointError, OptionError


class FakeTokenizer:
    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[i] for i in ids)


@dataclass
class FakeStats:
    steps: int = 1
    tokens: int = 4
    tokens_per_step: float = 3.0

    def to_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "tokens": self.tokens}


@dataclass
class Script:
    """What the fake engine does, and what it was asked."""

    pieces: list[tuple[str, list[int], Any]] = field(
        default_factory=lambda: [
            ("def", [0], None),
            (" read()", [1, 2, 3], FORKED),
        ]
    )
    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    raised: BaseException | None = None
    failure: str | None = None
    opened: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    prompt: Any = None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()

    class LLM:
        tokenizer = property(lambda self: script.tokenizer)
        notes = ("skipped 23 vision tensors",)

        def __init__(self, **options: Any) -> None:
            script.opened = options

        def stream(self, prompt: Any, params: Any) -> Iterator[Any]:
            script.prompt = prompt
            if script.raised is not None:
                raise script.raised
            text, ids = "", []
            for at, (piece, new, step) in enumerate(script.pieces):
                text, ids = text + piece, [*ids, *new]
                output = SimpleNamespace(
                    text=text,
                    token_ids=ids,
                    finish_reason="length",
                    seed=11,
                    prompt_tokens=5,
                    stats=FakeStats(),
                    error=script.failure,
                    stopped_by=None,
                    log_probs=None,
                    prompt_log_probs=None,
                )
                last = at == len(script.pieces) - 1
                yield SimpleNamespace(
                    text=piece, token_ids=new, step=step, output=output if last else None
                )

    class SamplingParams(SimpleNamespace):
        def __init__(self, **params: Any) -> None:
            super().__init__(**params)
            script.params = params

    for name, content in {
        "kdtree_engine.engine": {},
        "kdtree_engine.engine.llm": {"LLM": LLM},
        "kdtree_engine.engine.sampling_params": {"SamplingParams": SamplingParams},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return script


def test_text_streams_to_stdout_and_statistics_to_stderr(
    engine: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", "--prompt", "x"]) == 0
    out, err = capsys.readouterr()
    assert out == "def read()\n"
    lines = (
        r"kdtree: skipped 23 vision tensors\n"
        r"kdtree: 4 tokens in 1 steps, 3\.00 tokens/step, [\d.]+ tokens/s, ended by length\n"
    )
    assert re.fullmatch(lines, err)


def test_speed_leaves_out_prefill_and_printing() -> None:
    now = 0.0

    def events() -> Iterator[Any]:
        nonlocal now
        for seconds, count in ((50.0, 0), (70.0, 1), (0.5, 3), (0.5, 1)):
            now += seconds
            yield SimpleNamespace(token_ids=[0] * count)

    speed = Speed(clock=lambda: now)
    for _ in speed.timed(events()):
        now += 10.0  # printing
    assert speed.tokens_per_second == 4.0


def test_speed_of_a_single_token_is_unknown() -> None:
    speed = Speed(clock=iter([0.0, 1.0, 2.0]).__next__)
    assert len(list(speed.timed(iter([SimpleNamespace(token_ids=[0])])))) == 1
    assert speed.tokens_per_second is None


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_request_that_failed_shows_its_text_and_its_error(
    engine: Script, capsys: pytest.CaptureFixture[str], json_flag: list[str]
) -> None:
    engine.failure = "logits are not finite"
    assert cli.run(["generate", "--prompt", "x", *json_flag]) == 1
    out, err = capsys.readouterr()
    assert "def read()" in out
    assert err.endswith("kdtree: logits are not finite\n")
    if json_flag:
        assert json.loads(out)["error"] == "logits are not finite"


def test_each_piece_is_flushed_before_the_next_is_made(
    engine: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    class Out(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Out())
    assert cli.run(["generate", "--prompt", "x"]) == 0
    assert flushed[:2] == ["def", "def read()"]


def test_text_that_ends_its_line_gets_no_second_newline(
    engine: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.pieces = [("x", [6], None), ("\n", [5], None), ("", [], None)]
    assert cli.run(["generate", "--prompt", "x"]) == 0
    assert capsys.readouterr().out == "x\n"


def test_options_reach_the_engine(engine: Script) -> None:
    arguments = (
        "generate folder --prompt-ids 3,4,5 --max-tokens 7 --temperature 0.5 --top-k 9 --top-p 0.9"
        " --min-p 0.1 --seed 11 --ignore-eos --drafter ngram --tree-nodes chain:3 --device cpu"
        " --dtype float32 --prefill-chunk 64 --eager --stop -x --stop end --min-tokens 2"
        " --repetition-penalty 1.5 --frequency-penalty 0.5 --presence-penalty -0.5"
        " --logit-bias 3:-1.5,4:2 --allowed-ids 3,4 --bad-words worse --json --logprobs 2"
        " --prompt-logprobs 0"
    )
    assert cli.run(arguments.split()) == 0
    assert engine.prompt == [3, 4, 5]
    assert engine.params == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
        "ignore_eos": True,
        "stop": ["-x", "end"],
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {3: -1.5, 4: 2.0},
        "allowed_token_ids": [3, 4],
        "bad_words": ["worse"],
        "logprobs": 2,
        "prompt_logprobs": 0,
    }
    assert engine.opened == {
        "model": "folder",
        "drafter": "ngram",
        "device": "cpu",
        "dtype": "float32",
        "tree_nodes": "chain:3",
        "prefill_chunk": 64,
        "max_requests": 1,
        "eager": True,
    }


def test_defaults(engine: Script) -> None:
    assert cli.run(["generate", "--prompt", ""]) == 0
    assert engine.prompt == ""
    assert engine.opened["model"] is None
    assert engine.opened["tree_nodes"] == 15
    assert engine.opened["eager"] is False
    assert engine.params["max_tokens"] == 128
    assert engine.params["temperature"] == 0.0
    assert engine.params["seed"] is None


def test_json_is_one_object_and_nothing_else(
    engine: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", "--prompt", "x", "--json", "--show-tree"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "text": "def read()",
        "token_ids": [0, 1, 2, 3],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 5, "completion_tokens": 4},
        "stats": {"steps": 1, "tokens": 4},
        "seed": 11,
    }
    assert err.startswith("step 1: 4 drafted, 2 accepted\n")


def test_a_sampled_run_names_its_seed(engine: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "--prompt", "x", "--temperature", "1"]) == 0
    assert capsys.readouterr().err.endswith("ended by length, seed 11\n")


def test_without_a_vocabulary_ids_are_printed(
    engine: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.tokenizer = None
    engine.pieces = [("", [0], None), ("", [], None), ("", [1, 2, 3], FORKED)]
    assert cli.run(["generate", "--prompt-ids", "3", "--show-tree"]) == 0
    out, err = capsys.readouterr()
    assert out == "0,1,2,3\n"
    assert "● 0\n├── ● 1  50%\n" in err


def test_a_prompt_file_keeps_its_bytes(
    engine: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt"
    path.write_bytes("é\r\n\n".encode())
    assert cli.run(["generate", "--prompt-file", str(path)]) == 0
    assert engine.prompt == "é\r\n\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin\n")))
    assert cli.run(["generate", "--prompt-file", "-"]) == 0
    assert engine.prompt == "from stdin\n"


@pytest.mark.parametrize("prompt", ["-x", "--json", "- item"])
def test_a_prompt_may_begin_with_a_hyphen(engine: Script, prompt: str) -> None:
    assert cli.run(["generate", "--prompt", prompt]) == 0
    assert engine.prompt == prompt


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate"], "found none of them"),
        (["generate", "--prompt", "a", "--prompt-ids", "3"], "found --prompt and --prompt-ids"),
        (["generate", "--prompt-ids", "3,x"], "'3,x'"),
        (["generate", "--prompt-ids", ""], "--prompt-ids"),
        (["generate", "--prompt-file", "/no/such/file"], "/no/such/file: No such file"),
        (["generate", "--prompt", "\udce9"], "not UTF-8"),
        (["generate", "--prompt"], "--prompt"),
        (["generate", "--prompt", "a", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "--prompt", "a", "--max-tokens", "9" * 5000], "--max-tokens"),
        (["generate", "--prompt", "a", "--seed", "9" * 5000], "--seed"),
        (["generate", "--prompt", "a", "--tree-nodes", "9" * 5000], "--tree-nodes is '999"),
        (["generate", "--prompt", "a", "--tree-nodes", "chain:" + "9" * 5000], "'chain:999"),
        (["generate", "--prompt", "a", "--no-such"], "--no-such"),
        (["generate", "m", "n", "--prompt", "a"], "'n'"),
        (["generate", "--prompt", "a", "--no-json"], "--no-json"),
        (["generat"], "generat"),
        (["--no-such"], "--no-such"),
    ],
)
def test_misuse_is_one_line_and_code_2(
    engine: Script, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kdtree: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_prompt_file_that_is_not_text(
    engine: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"ab\xff")
    assert cli.run(["generate", "--prompt-file", str(path)]) == 2
    assert capsys.readouterr().err == f"kdtree: --prompt-file {path} is not UTF-8 (byte 2)\n"


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (CheckpointError("no config.json\n in /m"), 1, "kdtree: no config.json in /m\n"),
        (OptionError("temperature is -1"), 2, "kdtree: temperature is -1\n"),
        (PermissionError(13, "Permission denied", "/m"), 1, "kdtree: /m: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_the_engine(
    engine: Script,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    line: str,
) -> None:
    engine.raised = raised
    assert cli.run(["generate", "--prompt", "x"]) == code
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_before(closed: str) -> None:
    """No traceback: nothing is read, and what would be printed goes nowhere."""
    begin = "from kdtree_engine.cli import main; main()"
    command = f"{sys.executable} -c {begin!r} inspect {closed}".replace("'", '"')
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stderr
    command = command.replace(" inspect", " generate --prompt-file -")
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert "Traceback" not in done.stderr and done.returncode == 2, done.stderr


def test_a_bug_keeps_its_traceback(engine: Script) -> None:
    engine.raised = AssertionError("an invariant")
    with pytest.raises(AssertionError, match="an invariant"):
        cli.run(["generate", "--prompt", "x"])


def test_a_bad_variable_is_one_line(
    engine: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KDTREE_LOG", "loud")
    assert cli.run(["generate", "--prompt", "x"]) == 2
    assert capsys.readouterr().err.startswith("kdtree: KDTREE_LOG is 'loud'")


def test_threads_follow_the_variable(engine: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert cli.run(["generate", "--prompt", "x"]) == 0
    monkeypatch.setenv("KDTREE_THREADS", "2")
    assert cli.run(["generate", "--prompt", "x"]) == 0
    assert asked == [2]


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    script = (
        "import sys, kdtree_engine.cli as cli\n"
        "sys.stdout.reconfigure(write_through=False)\n"
        "sys.exit(cli.run(['--version']) or cli.run(['generate', '--help']))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert "Traceback" not in child.stderr.read()
    child.wait()
