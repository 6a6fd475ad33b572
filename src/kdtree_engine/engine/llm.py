"""The offline API: a model, prompts in, text out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike

import torch
from torch import Tensor

from kdtree_engine.checkpoints import find_folder
from kdtree_engine.checkpoints.reader import check_folder
from kdtree_engine.config import EngineConfig
from kdtree_engine.engine.build import (
    DrafterChoice,
    build_engine,
    open_tokenizer,
    packaged_model,
    resolve_device,
    resolve_dtype,
)
from kdtree_engine.engine.chat import (
    ChatDelta,
    ChatMessage,
    Message,
    TokenReader,
    Tool,
    check_messages,
    check_tools,
    read_answer,
    tool_names,
)
from kdtree_engine.engine.inputs import Prompt, as_batch, as_token_ids, truth, whole
from kdtree_engine.engine.policy import parse_tree_nodes
from kdtree_engine.engine.request import Request, RequestOutput, StepResult, StreamEvent
from kdtree_engine.engine.sampling_params import SamplingParams
from kdtree_engine.errors import CapacityError, KDTreeError, OptionError, TokenizerError, shown
from kdtree_engine.sampling import draw_seed
from kdtree_engine.tokenizer.chat import ChatFormat, starts_in_reasoning
from kdtree_engine.tokenizer.messages import plain
from kdtree_engine.tokenizer.parse import ChatParser, output_grammar
from kdtree_engine.tokenizer.stops import StopStream

_MOST = 2**31 - 1
_MOST_REQUESTS = 4096  # each takes a page of scratch and a table of pages


class LLM:
    """A loaded model with its drafter.

    model: a checkpoint folder, or the name of a download in Hugging Face's cache (ORG/NAME, or
    ORG/NAME@REVISION); None is the packaged model. drafter: "auto" (the packaged drafter for the
    packaged model, else n-gram), "none", "ngram", "random", or a folder or name. device: "auto",
    "cpu", "cuda". dtype: "auto", "float32", "bfloat16". tree_nodes: draft nodes a step, 0 to 63, or
    "chain:N". prefill_chunk: prompt tokens of a request in one step. cache_pages: pages of 64
    tokens, None for as many as `max_requests` full-length requests need. eager: on CUDA, launch
    operators one by one instead of replaying graphs. `notes` says what was skipped of the folder.
    Threads may share it; they take turns, a step each.
    Raises KDTreeError subclasses.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        drafter: DrafterChoice = "auto",
        device: str = "auto",
        dtype: str = "auto",
        tree_nodes: int | str = 15,
        prefill_chunk: int = 512,
        cache_pages: int | None = None,
        max_requests: int = 8,
        eager: bool = False,
    ) -> None:
        chunk = whole("prefill_chunk", prefill_chunk, 1, _MOST)
        pages = 0 if cache_pages is None else whole("cache_pages", cache_pages, 1)
        places = whole("max_requests", max_requests, 1, _MOST_REQUESTS)
        if model is not None and not isinstance(model, str | PathLike):
            raise OptionError(
                f"model {shown(model)} must be a folder, or None for the packaged model"
            )
        policy = parse_tree_nodes(tree_nodes)
        config = EngineConfig(
            policy.nodes, policy.chain, chunk, pages, places, truth("eager", eager)
        )
        folder = packaged_model() / "target" if model is None else find_folder(model)
        check_folder(folder)
        place = resolve_device(device)
        self.tokenizer = open_tokenizer(folder)
        self.engine, self.notes = build_engine(
            folder, drafter, place, resolve_dtype(dtype, place), config, self.tokenizer
        )
        self._folder = folder
        self._formats: dict[str | None, ChatFormat] = {}  # by the family asked for
        self._inboxes: dict[int, deque[StepResult]] = {}  # of open streams, by request
        self._turn = threading.RLock()  # of whichever thread changes the engine: one at a time

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts (texts or lists of token ids), several at a time; outputs in order,
        each prompt's n next to each other. Samples of one prompt share its computation.

        Raises OptionError, TokenizerError or CapacityError before anything runs.
        """
        batch = as_batch(prompts)
        one = SamplingParams() if params is None else params
        settings = one if isinstance(one, Sequence) else [one] * len(batch)
        for setting in settings:
            _check_params(setting)
        if len(settings) != len(batch):
            raise OptionError(f"{len(batch)} prompts came with {len(settings)} sampling settings")
        requests = self._queue(batch, settings)
        try:
            while any(request.finish_reason is None for request in requests):
                self._step()
        finally:
            self._cancel(requests)
        outputs = [self._output(request) for request in requests]
        for index, request in enumerate(requests):
            if request.after is not None:  # the first of a prompt's samples has scored it
                first = outputs[requests.index(request.after)]
                outputs[index] = replace(outputs[index], prompt_log_probs=first.prompt_log_probs)
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Complete one prompt, an event a step; the last event carries the output."""
        params = SamplingParams() if params is None else params
        _check_params(params)
        if params.n > 1:
            raise OptionError(f"n {params.n}: a stream has one output; generate() gives several")
        text = self._text_of(params)
        inbox: deque[StepResult] = deque()
        with self._turn:  # a step of another thread finds the inbox
            [request] = self._queue([prompt], [params])
            self._inboxes[request.id] = inbox
        last = False
        try:
            while not last:
                if not inbox and request.finish_reason is None:
                    self._step()
                    continue
                # Another caller's interrupted step may have ended it without a result.
                result = inbox.popleft() if inbox else StepResult(request, [])
                last = request.finish_reason is not None and not inbox
                yield self._event(request, result, text, last)
        finally:
            with self._turn:
                del self._inboxes[request.id]
                self._cancel([request])

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        tools: Sequence[Tool] | None = None,
        thinking: bool = True,
        preserve_thinking: bool = False,
        family: str | None = None,
    ) -> ChatMessage:
        """Answer a dialogue of messages in OpenAI's form, perhaps with calls of `tools`.

        thinking: whether the model is to reason first. preserve_thinking: keep the reasoning of
        earlier turns. family: how the model writes dialogues, None for what its folder tells.
        Raises OptionError or TokenizerError for messages that are no dialogue, before anything
        runs, and as `generate`.
        """
        options = (messages, sampling, tools, thinking, preserve_thinking, family)
        *_, last = self.chat_stream(*options)
        assert last.message is not None
        return last.message

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        tools: Sequence[Tool] | None = None,
        thinking: bool = True,
        preserve_thinking: bool = False,
        family: str | None = None,
    ) -> Iterator[ChatDelta]:
        """The same, a delta a step; the last one carries the message. Raises as `chat`."""
        params = SamplingParams() if sampling is None else sampling
        _check_params(params)
        calls = check_messages(messages)
        check_tools(tools)
        messages = plain(messages, "messages")
        tools = None if tools is None else plain(tools, "tools")
        if self.tokenizer is None:
            raise self._no_tokenizer("chat needs one")
        chat = self._format(family)
        options = (
            truth("thinking", thinking),
            truth("preserve_thinking", preserve_thinking),
        )
        parts = chat.parts(list(self.tokenizer.special_ids), messages, tools, *options)
        inside = starts_in_reasoning("".join(text for text, _ in parts[-3:]))
        grammar = output_grammar(chat.family)
        parser = ChatParser(grammar, inside, calls, tool_names(tools))
        reader = TokenReader(self.tokenizer, grammar, parser, params.stop or (), params.min_tokens)
        return read_answer(self.stream(self.tokenizer.encode_parts(parts), params), reader)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 logits [T, vocab] after every prefix of `token_ids`, as any prefill computes
        them.
        """
        tokens = self._encode(token_ids)
        with self._turn:
            request = self.engine.add(tokens, SamplingParams(), keep_logits=True)
        try:
            while request.is_prefill and request.finish_reason is None:
                self._step()
        finally:
            self._cancel([request])
        if request.error is not None:  # another thread's step, in which it was, did not end
            raise CapacityError(f"the logits were not computed: {request.error}")
        return torch.cat(request.logits)

    def _format(self, family: str | None) -> ChatFormat:
        """The chat format, read from the folder once."""
        if family is not None and not isinstance(family, str):
            raise OptionError(
                f"family {shown(family)} must be a name, or None for the folder's own"
            )
        if family not in self._formats:
            self._formats[family] = ChatFormat.from_folder(self._folder, family)
        return self._formats[family]

    def _step(self) -> None:
        """Advance everything; what happened to streamed requests waits for whoever reads them."""
        with self._turn:
            for result in self.engine.step():
                inbox = self._inboxes.get(result.request.id)
                if inbox is not None:
                    inbox.append(result)

    def _cancel(self, requests: Sequence[Request]) -> None:
        with self._turn:
            for request in requests:
                self.engine.cancel(request)

    def _queue(
        self, prompts: Sequence[Prompt], settings: Sequence[SamplingParams]
    ) -> list[Request]:
        """Add all samples of all prompts, or none."""
        encoded = [self._encode(prompt) for prompt in prompts]
        requests: list[Request] = []
        with self._turn:
            try:
                for tokens, params in zip(encoded, settings, strict=True):
                    first: Request | None = None
                    for sample, one in enumerate(_samples(params)):
                        added = self.engine.add(tokens, one, sample=sample, after=first)
                        first = first or added
                        requests.append(added)
            except KDTreeError:
                self._cancel(requests)
                raise
        return requests

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return as_token_ids(prompt)
        if self.tokenizer is None:
            raise self._no_tokenizer("it takes token ids, not text")
        return self.tokenizer.encode(prompt)

    def _no_tokenizer(self, so: str) -> TokenizerError:
        return TokenizerError(
            f"{self._folder} has no tokenizer (tiktoken.model or tokenizer.json): {so}"
        )

    def _event(
        self, request: Request, result: StepResult, text: StopStream | None, last: bool
    ) -> StreamEvent:
        tokens = _visible(request, result.tokens) if last else result.tokens
        piece = "" if text is None else text.push(tokens)
        if last and text is not None:
            piece += text.finish()
        output = self._output(request) if last else None
        return StreamEvent(piece, result.tokens, result.trace, output, result.log_probs)

    def _text_of(self, params: SamplingParams) -> StopStream | None:
        """A detokeniser that ends before a stop text; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return StopStream(self.tokenizer.stream(), params.stop or (), params.min_tokens)

    def _output(self, request: Request) -> RequestOutput:
        ids, params = request.output_ids, request.params
        text = self._text_of(params)
        assert request.finish_reason is not None
        return RequestOutput(
            "" if text is None else text.push(_visible(request, ids)) + text.finish(),
            ids,
            request.finish_reason,
            request.seed,
            request.stats,
            request.prompt_tokens,
            request.error,
            request.sample,
            request.stopped_by,
            None if params.logprobs is None else request.log_probs,
            None if params.prompt_logprobs is None else [None, *request.prompt_log_probs],
        )


def _samples(params: SamplingParams) -> list[SamplingParams]:
    """The settings with which each of n samples would be drawn alone; the first scores the
    prompt for all.
    """
    if params.n == 1:
        return [params]
    seed = draw_seed() if params.seed is None else params.seed
    seeds = [seed, *((seed + sample) % 2**64 for sample in range(1, params.n))]
    alone = [replace(params, seed=one, n=1) for one in seeds]
    return [alone[0], *(replace(one, prompt_logprobs=None) for one in alone[1:])]


def _visible(request: Request, ids: list[int]) -> list[int]:
    """Without the stop token that ended the request."""
    return ids[:-1] if isinstance(request.stopped_by, int) and ids else ids


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise OptionError(f"sampling settings must be SamplingParams, not {shown(params)}")
