"""What sampling options mean, seen from outside: against a loop over `llm.logits`, one token at a
time. That trees change none of it is the contract's part (contract.py, axis "options").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import CheckpointMaker

from e2e.helpers import greedy, load, prompt
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.engine.build import open_tokenizer, packaged_model
from kdtree_engine.engine.edits import edits_of
from kdtree_engine.errors import OptionError

NEW = 24


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointMaker) -> Path:
    return checkpoint("k2.6")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return load(folder, drafter="ngram", tree_nodes=15)


def by_hand(llm: LLM, ids: Sequence[int], new: int, edit: Callable[..., None]) -> list[int]:
    """Greedy decoding over logits that `edit` changed, each from a prefill of its own."""
    tokens = list(ids)
    for _ in range(new):
        row = llm.logits(tokens)[-1].tolist()
        edit(row, list(ids), tokens[len(ids) :])
        tokens.append(max(range(len(row)), key=lambda token: (row[token], -token)))
    return tokens[len(ids) :]


def test_penalties(llm: LLM) -> None:
    ids = prompt(40, 3)
    repetition, frequency, presence = 1.5, 0.7, 0.9

    def edit(row: list[float], before: list[int], made: list[int]) -> None:
        counts = Counter(made)
        for token in {*before, *made}:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token, count in counts.items():
            row[token] -= frequency * count + presence

    [out] = llm.generate(
        ids,
        greedy(
            NEW,
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
        ),
    )
    assert out.token_ids == by_hand(llm, ids, NEW, edit)
    assert out.token_ids != llm.generate(ids, greedy(NEW))[0].token_ids


def test_bias_and_allowed_tokens(llm: LLM) -> None:
    ids = prompt(12, 1)
    allowed = list(range(20, 60))

    def edit(row: list[float], before: list[int], made: list[int]) -> None:
        row[30] += 3.0
        row[31] -= 100.0
        for token in range(len(row)):
            if token not in allowed:
                row[token] = -math.inf

    params = greedy(NEW, logit_bias={30: 3.0, 31: -100.0}, allowed_token_ids=allowed)
    assert llm.generate(ids, params)[0].token_ids == by_hand(llm, ids, NEW, edit)


def test_bad_words_as_they_are_written() -> None:
    """A text counts as it stands, without its leading spaces, and with one; spaces alone count."""
    tokenizer = open_tokenizer(packaged_model() / "target")
    assert tokenizer is not None
    found = edits_of(SamplingParams(bad_words=["   x", " "]), tokenizer, tokenizer.vocab_size)
    assert found is not None
    for text in ("   x", " x", "x", " "):
        assert tuple(tokenizer.encode(text)) in set(map(tuple, found.bad)), text


def test_bad_words(llm: LLM) -> None:
    ids = prompt(12, 1)
    said = llm.generate(ids, greedy(NEW))[0].token_ids
    words = [[said[0]], said[3:5], [ids[-1], said[1]], said[6:9]]

    def edit(row: list[float], before: list[int], made: list[int]) -> None:
        text = before + made
        for word in words:
            if text[len(text) - len(word) + 1 :] == word[:-1]:
                row[word[-1]] = -math.inf

    out = llm.generate(ids, greedy(NEW, bad_words=words))[0].token_ids
    assert out == by_hand(llm, ids, NEW, edit) != said
    text = [*ids[-1:], *out]
    assert not any(
        text[place : place + len(word)] == word for word in words for place in range(len(text))
    )


def test_stop_tokens_wait_for_min_tokens(llm: LLM) -> None:
    ids = prompt(12, 1)
    said = llm.generate(ids, greedy(NEW))[0].token_ids
    stop = said[2]
    [early] = llm.generate(ids, greedy(NEW, stop_token_ids=[stop]))
    assert early.token_ids == said[: said.index(stop) + 1] and early.stopped_by == stop
    for least in (1, 3, 7, NEW):
        [out] = llm.generate(ids, greedy(NEW, stop_token_ids=[stop], min_tokens=least))
        assert len(out.token_ids) >= least and stop not in out.token_ids[:least]
        assert (out.finish_reason == "stop") == (stop in out.token_ids[least:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probs(llm: LLM, temperature: float) -> None:
    """The model's own distribution, whatever changes the choice."""
    ids = prompt(150, 4)
    params = greedy(
        NEW, temperature=temperature, seed=1, logprobs=3, prompt_logprobs=2, presence_penalty=1.0
    )
    [out] = llm.generate(ids, params)
    exact = torch.log_softmax(llm.logits([*ids, *out.token_ids]).double(), -1)
    assert out.log_probs is not None and out.prompt_log_probs is not None
    assert [one.token for one in out.log_probs] == out.token_ids
    assert out.prompt_log_probs[0] is None
    told = [*out.prompt_log_probs[1:], *out.log_probs]
    assert len(told) == len(ids) + NEW - 1
    for row, one in zip(exact, told, strict=False):
        assert one is not None
        assert abs(one.log_prob - float(row[one.token])) < 1e-5
        assert len(one.top) == (3 if one in out.log_probs else 2)
        best = row.topk(len(one.top))
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert all(
            abs(found - want) < 1e-5
            for (_, found), want in zip(one.top, best.values.tolist(), strict=True)
        )
    samples = llm.generate(ids, replace(params, n=3))
    assert [one.prompt_log_probs for one in samples] == [out.prompt_log_probs] * 3
    assert samples[0].log_probs == out.log_probs
    assert samples[1].stats.cached_tokens > 0, "the prompt is computed, and scored, once"
    [none] = llm.generate(ids, greedy(3, logprobs=0))
    assert none.log_probs is not None and all(one.top == () for one in none.log_probs)
    [off] = llm.generate(ids, greedy(3))
    assert off.log_probs is None and off.prompt_log_probs is None


def test_options_of_neighbours_stay_apart(llm: LLM) -> None:
    """Requests of all kinds in one step, on places that others have used before."""
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5},
        {"bad_words": [[7], [8, 9]]},
        {"logprobs": 4},
        {"allowed_token_ids": [3, 4, 5]},
        {"min_tokens": 5, "stop_token_ids": [11]},
        {"presence_penalty": 2.0, "frequency_penalty": -1.0},
    ]
    prompts = [prompt(10 + 9 * index, index) for index in range(len(kinds))]
    params = [greedy(NEW, temperature=1.0, seed=5, **kind) for kind in kinds]
    alone = [llm.generate(ids, one)[0] for ids, one in zip(prompts, params, strict=True)]
    for turn in range(3):
        order = list(range(turn, len(kinds))) + list(range(turn))
        outs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        for index, out in zip(order, outs, strict=True):
            assert out.token_ids == alone[index].token_ids
            assert out.log_probs == alone[index].log_probs


def test_stop_texts() -> None:
    """The text ends before them, in a stream too; they may lie across tokens."""
    llm, ids = LLM(device="cpu"), "def read_lines(path):\n"
    [whole] = llm.generate(ids, greedy(60))
    text = whole.text
    for begin, size in ((5, 1), (11, 3), (20, 7)):
        stop = text[begin : begin + size]
        params = greedy(60, stop=["not there", stop])
        [out] = llm.generate(ids, params)
        assert out.text == text[: text.index(stop)]
        assert (out.finish_reason, out.stopped_by) == ("stop", stop)
        assert whole.token_ids[: len(out.token_ids)] == out.token_ids
        events = list(llm.stream(ids, params))
        assert "".join(event.text for event in events) == out.text
        assert events[-1].output is not None and events[-1].output.text == out.text
    [late] = llm.generate(ids, greedy(60, stop=text[0], min_tokens=1))
    assert late.text.startswith(text[0])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
    ({"repetition_penalty": math.nan}, "repetition_penalty nan"),
    ({"frequency_penalty": 2.5}, "frequency_penalty 2.5 must be between -2 and 2"),
    ({"presence_penalty": "1"}, "presence_penalty '1' must be a number"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"3": 1.0}}, "logit_bias key '3' must be a token id"),
    ({"logit_bias": {3: 101}}, "logit_bias of token 3 is 101"),
    ({"logit_bias": {3: math.nan}}, "logit_bias of token 3 is nan"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids '12' must be a list"),
    ({"bad_words": "word"}, "bad_words 'word' must be a list"),
    ({"bad_words": [""]}, "bad_words has an empty entry"),
    ({"bad_words": [[]]}, "bad_words has an empty entry"),
    ({"min_tokens": -1}, "min_tokens -1 must be 0 to max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 must be 0 to max_tokens, 4"),
    ({"logprobs": 21}, "logprobs 21 must be 0 to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs -1 must be 0 to 20"),
    ({"logprobs": True}, "logprobs True must be an integer or None"),
    ({"stop": [""]}, "stop text '' has 0 characters"),
    ({"stop": ["a"] * 17}, "stop has 17 texts; at most 16"),
    ({"stop": [3]}, "stop .* must be a text or a list of texts"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {191222: -100.0}}, "logit_bias: token 191222 is outside the vocabulary"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids: token -1 is outside"),
        ({"bad_words": [[1, 999999]]}, "bad_words: token 999999 is outside"),
        ({"bad_words": [[1] * 17]}, "bad_words has a word of 17 tokens; 1 to 16"),
        ({"bad_words": [[1, n] for n in range(65)]}, "bad_words makes 65 sequences"),
        ({"allowed_token_ids": [3], "bad_words": [[3]]}, "leave no token"),
        ({"bad_words": ["text"]}, "no tokenizer: give token ids"),
        ({"stop": "text"}, "no tokenizer: use stop_token_ids"),
    ],
)
def test_values_that_the_model_refuses(llm: LLM, options: dict[str, Any], message: str) -> None:
    """Before anything runs, and to no harm of others."""
    with pytest.raises(OptionError, match=message):
        llm.generate([prompt(5, 0), prompt(6, 0)], [greedy(3), greedy(3, **options)])
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_a_row_without_a_choice_fails_alone(llm: LLM) -> None:
    """Only the one token that is left is forbidden by what came before it."""
    params = greedy(8, allowed_token_ids=[5], bad_words=[[5, 5]])
    outs = llm.generate([prompt(9, 0), prompt(9, 1)], [params, greedy(8)])
    assert outs[0].token_ids == [5] and outs[0].finish_reason == "error"
    assert outs[0].error is not None and "no token could be chosen" in outs[0].error
    assert outs[1].finish_reason == "length"
