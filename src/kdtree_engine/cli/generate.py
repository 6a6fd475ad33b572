"""`kdtree generate`: one prompt, its text as it is made, and how fast it was made."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

from cyclopts import Group, Parameter

from kdtree_engine.cli.options import (
    OUTPUT,
    SAMPLING,
    EngineOptions,
    SamplingOptions,
    flag,
    option,
    token_ids,
    words,
)
from kdtree_engine.errors import KDTreeError, OptionError
from kdtree_engine.log import progress

if TYPE_CHECKING:
    from kdtree_engine.cli.show_tree import TreePrinter
    from kdtree_engine.engine.llm import LLM
    from kdtree_engine.engine.request import RequestOutput, TokenLogProb
    from kdtree_engine.engine.sampling_params import SamplingParams


PROMPT = Group("Prompt", sort_key=0)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions, EngineOptions):
    """Every option of `kdtree generate`; the engine checks the values."""

    prompt: Annotated[str | None, words(PROMPT, "The prompt's text.", "TEXT")] = None
    prompt_file: Annotated[
        str | None, words(PROMPT, "A UTF-8 file with the prompt; - is stdin.", "FILE")
    ] = None
    prompt_ids: Annotated[str | None, words(PROMPT, "The prompt as token ids: 3,4,5.", "IDS")] = (
        None
    )

    ignore_eos: Annotated[bool, flag(SAMPLING, "Go on after a stop token.")] = False

    logprobs: Annotated[
        int | None, option(OUTPUT, "With --json: log-probabilities of N likeliest tokens too.", "N")
    ] = None
    prompt_logprobs: Annotated[
        int | None, option(OUTPUT, "With --json: the same for the prompt's tokens.", "N")
    ] = None
    json: Annotated[bool, flag(OUTPUT, "Print one JSON object.")] = False
    show_tree: Annotated[bool, flag(OUTPUT, "Draw each step's draft tree on stderr.")] = False


def generate(model: str | None = None, /, *, options: GenerateOptions | None = None) -> None:
    """Complete a prompt. Text goes to stdout as it is made, statistics to stderr.

    Parameters
    ----------
    model
        A model folder or a downloaded ORG/NAME; the packaged model without it.
    """
    options = options or GenerateOptions()
    if not options.json and (options.logprobs, options.prompt_logprobs) != (None, None):
        raise OptionError("--logprobs and --prompt-logprobs are shown with --json only; add it")
    prompt = read_prompt(options)
    llm = options.open_engine(model)
    params = options.sampling(
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
    )
    output, speed = _stream(llm, prompt, params, options)
    if options.json:
        print(json.dumps(as_json(output)))
    else:
        for note in llm.notes:
            print(f"kdtree: {note}", file=sys.stderr)
        print(f"kdtree: {summary(output, speed, options.temperature > 0)}", file=sys.stderr)
    if output.error is not None:
        raise KDTreeError(output.error)


def read_prompt(options: GenerateOptions) -> str | list[int]:
    """The one prompt that was given. OptionError where there is none, several, or it is no text."""
    given = {
        "--prompt": options.prompt,
        "--prompt-file": options.prompt_file,
        "--prompt-ids": options.prompt_ids,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        found = " and ".join(named) or "none of them"
        raise OptionError(f"give one of --prompt, --prompt-file and --prompt-ids; found {found}")
    ids = token_ids("--prompt-ids", options.prompt_ids)
    if ids is not None:
        return ids
    if options.prompt_file is not None:
        return _read_file(options.prompt_file)
    assert options.prompt is not None
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"--prompt is not UTF-8 (byte {error.start})") from error
    return options.prompt


def _read_file(name: str) -> str:
    # Bytes, not text mode: a model sees the difference between \r\n and \n.
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode()
    except OSError as error:
        raise OptionError(f"--prompt-file {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"--prompt-file {name} is not UTF-8 (byte {error.start})") from error


def _stream(
    llm: LLM, prompt: str | list[int], params: SamplingParams, options: GenerateOptions
) -> tuple[RequestOutput, Speed]:
    """Run the request and show it as asked; also how fast it decoded."""
    writer = _Writer(llm.tokenizer is not None, live=not (options.json or options.show_tree))
    trees = _tree_printer(llm) if options.show_tree else None
    speed = Speed()
    output: RequestOutput | None = None
    # Flowing text is its own progress bar.
    quiet = options.json and not options.show_tree
    with progress("generating", params.max_tokens, shown=quiet) as meter:
        for event in speed.timed(llm.stream(prompt, params)):
            meter.advance(len(event.token_ids))
            writer.add(event.text, event.token_ids)
            if trees is not None and event.step is not None:
                trees.show(event.step)
            output = event.output or output
    assert output is not None, "the stream ended without an output"
    if not options.json:
        writer.finish()
    return output, speed


class _HasTokens(Protocol):
    @property
    def token_ids(self) -> list[int]: ...


_Step = TypeVar("_Step", bound=_HasTokens)


class Speed:
    """Decoding speed: what came after the first tokens (which end the prefill), without our own
    printing."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._tokens = 0

    @property
    def tokens_per_second(self) -> float | None:
        """None where nothing came after the first tokens."""
        return self._tokens / self._seconds if self._tokens and self._seconds > 0 else None

    def timed(self, events: Iterator[_Step]) -> Iterator[_Step]:
        """The same events; only the time spent waiting for them counts."""
        decoding = False
        while True:
            start = self._clock()
            event = next(events, None)
            if event is None:
                return
            if decoding:
                self._seconds += self._clock() - start
                self._tokens += len(event.token_ids)
            decoding = decoding or bool(event.token_ids)
            yield event


def _tree_printer(llm: LLM) -> TreePrinter:
    from kdtree_engine.cli.show_tree import TreePrinter

    tokenizer = llm.tokenizer
    if tokenizer is None:
        return TreePrinter(str, sys.stderr)
    return TreePrinter(lambda token: tokenizer.decode([token]), sys.stderr)


class _Writer:
    """The result on stdout: text, or comma-separated ids where no vocabulary knows the text."""

    def __init__(self, has_text: bool, live: bool) -> None:
        self._has_text, self._live = has_text, live
        self._held: list[str] = []
        self._first = True
        self._ended_line = False

    def add(self, text: str, ids: Sequence[int]) -> None:
        piece = text
        if not self._has_text:
            piece = ",".join(map(str, ids))
            if piece and not self._first:
                piece = f",{piece}"
        if not piece:
            return
        self._first = False
        self._ended_line = piece.endswith("\n")
        if self._live:
            sys.stdout.write(piece)
            sys.stdout.flush()
        else:
            self._held.append(piece)

    def finish(self) -> None:
        """Print what was held back, and end the last line so that the statistics stand alone."""
        sys.stdout.write("".join(self._held) + ("" if self._ended_line else "\n"))
        sys.stdout.flush()


def as_json(output: RequestOutput) -> dict[str, object]:
    """What --json prints."""
    fields: dict[str, object] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": len(output.token_ids),
        },
        "stats": output.stats.to_dict(),
        "seed": output.seed,
    }
    if output.stopped_by is not None:
        fields["stopped_by"] = output.stopped_by
    for name, found in (
        ("logprobs", output.log_probs),
        ("prompt_logprobs", output.prompt_log_probs),
    ):
        if found is not None:
            fields[name] = [None if one is None else _as_json(one) for one in found]
    if output.error is not None:
        fields["error"] = output.error
    return fields


def _as_json(one: TokenLogProb) -> dict[str, object]:
    """JSON has no infinities: a token that cannot come has no log-probability."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    top = [[token, number(value)] for token, value in one.top]
    return {"token": one.token, "log_prob": number(one.log_prob), "top": top}


def summary(output: RequestOutput, speed: Speed, sampled: bool) -> str:
    """The statistics line. Tokens per second leave the prompt's prefill out."""
    stats = output.stats
    parts = [
        f"{stats.tokens} tokens in {stats.steps} steps",
        f"{stats.tokens_per_step:.2f} tokens/step",
    ]
    rate = speed.tokens_per_second
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    parts.append(f"ended by {output.finish_reason}")
    if sampled:
        parts.append(f"seed {output.seed}")
    return ", ".join(parts)
