"""`kdtree chat`: a conversation in the terminal, or line by line through pipes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from kdtree_engine.cli.generate import Speed, summary
from kdtree_engine.cli.options import SAMPLING, EngineOptions, SamplingOptions, flag, option, words
from kdtree_engine.cli.screen import Screen, open_screen
from kdtree_engine.errors import KDTreeError

if TYPE_CHECKING:
    from kdtree_engine.engine.chat import ChatDelta, ChatMessage
    from kdtree_engine.engine.llm import LLM

CHAT = Group("Chat", sort_key=0)
HELP = "/reset forgets the conversation, /stats says how fast it went, /exit or Ctrl-D ends it"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions, EngineOptions):
    """Every option of `kdtree chat`; the engine checks the values."""

    system: Annotated[str | None, words(CHAT, "What the model is told first.", "TEXT")] = None
    no_thinking: Annotated[bool, flag(CHAT, "Answer without reasoning first.")] = False
    family: Annotated[
        str | None, option(CHAT, "The chat format; the folder's own without it.", "NAME")
    ] = None

    max_tokens: Annotated[int, option(SAMPLING, "Tokens of an answer at most.", "N")] = 1024


def chat(model: str | None = None, /, *, options: ChatOptions | None = None) -> None:
    """Talk with a model. Ctrl-C stops an answer; what it said so far stays in the conversation.

    Through pipes a line of stdin is a question; answers go to stdout, the rest to stderr.

    Parameters
    ----------
    model
        A model folder or a downloaded ORG/NAME; the packaged model without it.
    """
    options = options or ChatOptions()
    screen = open_screen()
    conversation = Conversation(options.open_engine(model), options)
    for note in conversation.notes:
        screen.note(note)
    if screen.interactive:
        screen.note(HELP)
    while (line := screen.ask()) is not None:
        if not respond(conversation, line.strip(), screen):
            break


def respond(conversation: Conversation, line: str, screen: Screen) -> bool:
    """Do what a line asks for; False to leave. A failure ends a script and not a conversation."""
    if line == "/exit":
        return False
    if line == "/reset":
        conversation.reset()
        screen.note("the conversation begins anew")
    elif line == "/stats":
        screen.note(conversation.stats())
    elif line.startswith("/") and line[1:].isalpha():
        screen.note(f"{line} is no command: {HELP}")
    elif line:
        try:
            conversation.ask(line, screen)
        except KDTreeError as error:
            if not screen.interactive:
                raise
            screen.note(f"{error} (the question is forgotten; /reset begins anew)")
    return True


class Conversation:
    """A model, and what was said."""

    def __init__(self, llm: LLM, options: ChatOptions) -> None:
        self.notes = llm.notes
        self._llm, self._options = llm, options
        self._params = options.sampling()
        self._totals = _Totals()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        system = self._options.system
        self.messages: list[dict[str, Any]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )

    def stats(self) -> str:
        """One line about the last answer and all of them."""
        return str(self._totals)

    def ask(self, question: str, screen: Screen) -> None:
        """Answer a question on the screen.

        An answer that was stopped stays as far as it went; where it had said nothing yet, or it
        failed, the question goes too. Raises KDTreeError.
        """
        before = len(self.messages)
        self.messages.append({"role": "user", "content": question})
        try:
            said = self._answer(screen)
        except BaseException:
            del self.messages[before:]
            raise
        if said is None:
            del self.messages[before:]
        else:
            self.messages.append(said)

    def _answer(self, screen: Screen) -> dict[str, Any] | None:
        from kdtree_engine.engine.chat import PartialAnswer

        options, answer, speed = self._options, PartialAnswer(), Speed()
        message: ChatMessage | None = None
        with _interrupt(screen.interactive) as stopped:
            stream: Iterator[ChatDelta] = self._llm.chat_stream(
                self.messages,
                self._params,
                thinking=not options.no_thinking,
                family=options.family,
            )
            for delta in speed.timed(stream):
                answer.add(delta.events)
                screen.show(delta.events)
                message = delta.message or message
                if stopped():
                    break
        screen.end_answer()
        if message is None:
            screen.note("stopped")
            return {"role": "assistant", "content": answer.content} if answer.content else None
        self._totals.add(message, speed, options.temperature > 0)
        if message.output.error is not None:
            raise KDTreeError(message.output.error)
        if message.finish_reason == "length":
            screen.note("the answer reached its last token: see --max-tokens, or /reset")
        return message.to_dict()


class _Totals:
    """What /stats says."""

    def __init__(self) -> None:
        self._answers = self._tokens = self._steps = 0
        self._last = ""

    def add(self, message: ChatMessage, speed: Speed, sampled: bool) -> None:
        output = message.output
        self._answers += 1
        self._tokens += output.stats.tokens
        self._steps += output.stats.steps
        found = f"prompt {output.prompt_tokens} tokens, {output.stats.cached_tokens} of them cached"
        self._last = f"last answer: {found}; {summary(output, speed, sampled)}"

    def __str__(self) -> str:
        if not self._answers:
            return "no answer yet"
        whole = f"{self._tokens} tokens in {self._steps} steps"
        return f"{self._last}; all {self._answers} that ended: {whole}"


@contextmanager
def _interrupt(interactive: bool) -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C only makes the result true; a second one interrupts as usual.

    An exception in the middle of a step would leave the engine in the middle of one, too. Where
    nobody types the program ends at once, as any in a pipe does.
    """
    count = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if interactive:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)
