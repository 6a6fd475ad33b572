"""Options that several commands have in common.

No postponed annotations here: cyclopts evaluates those of inherited fields among the names of the
module that inherits.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from kdtree_engine.cli.threads import set_threads
from kdtree_engine.errors import OptionError

if TYPE_CHECKING:
    from kdtree_engine.engine.llm import LLM
    from kdtree_engine.engine.sampling_params import SamplingParams

SAMPLING, ENGINE = Group("Sampling", sort_key=1), Group("Engine", sort_key=2)
OUTPUT = Group("Output", sort_key=3)


def option(group: Group, text: str, metavar: str) -> Parameter:
    """An option with a value."""
    return Parameter(help=text, group=group, metavar=metavar)


def words(group: Group, text: str, metavar: str) -> Parameter:
    """An option whose value may begin with a hyphen, as prompts and "-" for stdin do."""
    return Parameter(help=text, group=group, metavar=metavar, allow_leading_hyphen=True)


def flag(group: Group, text: str) -> Parameter:
    """An option without a value."""
    return Parameter(help=text, group=group, negative=(), show_default=False)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; the engine checks the values."""

    max_tokens: Annotated[int, option(SAMPLING, "Tokens to make at most.", "N")] = 128
    temperature: Annotated[
        float, option(SAMPLING, "0 takes the likeliest token each time.", "T")
    ] = 0.0
    top_k: Annotated[int | None, option(SAMPLING, "Only the K likeliest tokens.", "K")] = None
    top_p: Annotated[
        float | None, option(SAMPLING, "Only the likeliest tokens that make up P.", "P")
    ] = None
    min_p: Annotated[
        float | None, option(SAMPLING, "Only tokens at least P times the likeliest.", "P")
    ] = None
    seed: Annotated[
        int | None, option(SAMPLING, "Repeats a sample; one is drawn without it.", "S")
    ] = None
    stop: Annotated[
        list[str] | None, words(SAMPLING, "A text that ends the answer; may be repeated.", "TEXT")
    ] = None
    min_tokens: Annotated[
        int, option(SAMPLING, "Tokens to make before anything may end the answer.", "N")
    ] = 0
    repetition_penalty: Annotated[
        float, option(SAMPLING, "Divides logits of tokens seen; 1 is off.", "R")
    ] = 1.0
    frequency_penalty: Annotated[
        float, option(SAMPLING, "Taken off per time that a token was made.", "P")
    ] = 0.0
    presence_penalty: Annotated[
        float, option(SAMPLING, "Taken off once a token was made.", "P")
    ] = 0.0
    logit_bias: Annotated[
        str | None, words(SAMPLING, "Added to logits: ID:BIAS,ID:BIAS.", "LIST")
    ] = None
    allowed_ids: Annotated[str | None, option(SAMPLING, "Only these tokens: 3,4,5.", "IDS")] = None
    bad_words: Annotated[
        list[str] | None, words(SAMPLING, "A text that must not come; may be repeated.", "TEXT")
    ] = None

    def sampling(self, **more: Any) -> "SamplingParams":
        """The engine's settings; `more` of its fields. Imports torch."""
        from kdtree_engine.engine.sampling_params import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            min_tokens=self.min_tokens,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=_bias(self.logit_bias),
            allowed_token_ids=token_ids("--allowed-ids", self.allowed_ids),
            bad_words=self.bad_words,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the model is loaded and run; the engine checks the values."""

    drafter: Annotated[
        str, option(ENGINE, "auto, none, ngram, random, or a drafter's folder or ORG/NAME.", "X")
    ] = "auto"
    tree_nodes: Annotated[
        str, option(ENGINE, "Draft nodes per step (0 to 63), or chain:N.", "N")
    ] = "15"
    device: Annotated[str, option(ENGINE, "auto, cpu or cuda.", "D")] = "auto"
    dtype: Annotated[str, option(ENGINE, "auto, float32 or bfloat16.", "T")] = "auto"
    prefill_chunk: Annotated[int, option(ENGINE, "Prompt tokens per step.", "N")] = 512
    eager: Annotated[bool, flag(ENGINE, "On CUDA: no graphs, each operator launched.")] = False

    def open_engine(self, model: str | None) -> "LLM":
        """Load the model. Imports torch."""
        tree_nodes = _tree_nodes(self.tree_nodes)
        from kdtree_engine.engine.llm import LLM

        set_threads()
        return LLM(
            model=model,
            drafter=self.drafter,
            device=self.device,
            dtype=self.dtype,
            tree_nodes=tree_nodes,
            prefill_chunk=self.prefill_chunk,
            max_requests=1,
            eager=self.eager,
        )


def token_ids(name: str, text: str | None) -> list[int] | None:
    """Token ids as an option gives them, 3,4,5."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"{name} is {text!r:.60}: expected token ids like 3,4,5") from error


def _bias(text: str | None) -> dict[int, float] | None:
    if text is None:
        return None
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError as error:
        raise OptionError(f"--logit-bias is {text!r:.60}: expected ID:BIAS,ID:BIAS") from error


def _tree_nodes(text: str) -> int | str:
    """A plain number as one; the engine understands, or refuses, the rest."""
    if len(text) > 20:  # int() refuses thousands of digits with an error of its own
        raise OptionError(f"--tree-nodes is '{text[:20]}...': expected 0 to 63, or chain:N")
    return int(text) if text.isascii() and text.isdecimal() else text
