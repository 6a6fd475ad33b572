"""The packaged model as a new user meets it: exact, fast to accept, Python, and small."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.drafter.dflash import DFlashDrafter
from kdtree_engine.engine.build import packaged_model
from kdtree_engine.engine.request import RequestOutput

HELDOUT = Path(__file__).resolve().parents[2] / "benches" / "data" / "heldout.json"
CHOSEN = (1, 8, 23, 38)  # of two packages
LENGTH = 130  # tokens: two pages and little more, so that a hit leaves next to nothing to prefill
NEW = 48
SETTINGS = {
    "greedy": SamplingParams(max_tokens=NEW, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.0, seed=11),
}
MOST_FILE, MOST_TOGETHER = 15_000_000, 24_000_000  # bytes

PROMPTS = ("import os\n\n\nclass Config:\n", "import json\n\n\ndef read_lines(path):\n")


@dataclass(frozen=True, eq=False)
class Runs:
    """Outputs of one engine over the prompts, by sampling."""

    cold: dict[str, list[RequestOutput]]
    warm: dict[str, list[RequestOutput]]  # again, on the pages that the cold runs left
    lost: dict[str, list[RequestOutput]]  # again, without the drafter's share of those pages


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", tree_nodes=15)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    assert llm.tokenizer is not None
    texts = json.loads(HELDOUT.read_text(encoding="utf-8"))["prompts"]
    assert len({texts[index]["package"] for index in CHOSEN}) == 2
    encoded = [llm.tokenizer.encode(texts[index]["text"]) for index in CHOSEN]
    assert all(len(ids) > LENGTH for ids in encoded)
    return [ids[:LENGTH] for ids in encoded]


@pytest.fixture(scope="module")
def drafted(llm: LLM, prompts: list[list[int]]) -> Runs:
    assert isinstance(llm.engine.drafter, DFlashDrafter)
    cold: dict[str, list[RequestOutput]] = {}
    warm: dict[str, list[RequestOutput]] = {}
    lost: dict[str, list[RequestOutput]] = {}
    for name, params in SETTINGS.items():
        fresh = LLM(device="cpu", tree_nodes=15)
        cold[name] = fresh.generate(prompts, params)
        warm[name] = fresh.generate(prompts, params)
        fresh.engine.check_integrity()
        for keys_values in fresh.engine.pool.draft:
            keys_values.zero_()
        lost[name] = fresh.generate(prompts, params)
    return Runs(cold, warm, lost)


def tokens_per_step(outputs: list[RequestOutput]) -> float:
    """Pooled: one and the mean accepted drafts over all steps of all outputs."""
    accepted = [count for output in outputs for count in output.stats.accepted]
    return 1.0 + sum(accepted) / len(accepted)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_answer_is_plain_decodings(
    drafted: Runs, prompts: list[list[int]], sampling: str
) -> None:
    plain = LLM(device="cpu", drafter="none", tree_nodes=0).generate(prompts, SETTINGS[sampling])
    assert [len(output.token_ids) for output in plain] == [NEW] * len(prompts)
    assert tokens_per_step(plain) == 1.0
    for runs in (drafted.cold, drafted.warm, drafted.lost):
        got = [output.token_ids for output in runs[sampling]]
        assert got == [output.token_ids for output in plain]


def test_seeds_matter(drafted: Runs) -> None:
    """Or the sampled comparison above would be the greedy one."""
    for greedy, sampled in zip(drafted.cold["greedy"], drafted.cold["sampled"], strict=True):
        assert greedy.token_ids != sampled.token_ids


def test_trees_accept_more_than_one_draft_a_step(drafted: Runs) -> None:
    assert tokens_per_step(drafted.cold["greedy"]) > 2.0
    assert tokens_per_step(drafted.cold["sampled"]) > 1.2


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_prefix_hit_keeps_acceptance(drafted: Runs, sampling: str) -> None:
    cold, warm = drafted.cold[sampling], drafted.warm[sampling]
    assert [output.stats.cached_tokens for output in cold] == [0] * len(cold)
    assert all(output.stats.cached_tokens == 128 for output in warm)
    assert tokens_per_step(warm) == pytest.approx(tokens_per_step(cold), rel=0.05)
    # What the comparison would say of a hit that brings the target's latents alone.
    assert tokens_per_step(drafted.lost[sampling]) < 0.9 * tokens_per_step(cold)


def parsed_lines(source: str) -> int:
    """Lines of the longest beginning, in whole lines, that is valid Python."""
    lines = source.splitlines(keepends=True)
    for count in range(len(lines), 0, -1):
        try:
            ast.parse("".join(lines[:count]))
        except (SyntaxError, ValueError):  # ValueError: null characters
            continue
        return count
    return 0


def is_python(prompt: str, text: str) -> bool:
    """Whether the greater part of a text goes on with the prompt's open block as valid Python.

    The last block may be unfinished, whatever it is: a beginning of whole lines is to parse.
    """
    before, written = prompt.count("\n"), (prompt + text).rstrip().count("\n") + 1
    valid = parsed_lines(prompt + text)
    return valid > before + 3 and valid - before >= 0.6 * (written - before)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_it_writes_python(llm: LLM, prompt: str) -> None:
    [output] = llm.generate([prompt], SamplingParams(max_tokens=200))
    assert is_python(prompt, output.text), output.text


def test_what_is_not_python_is_told_apart(llm: LLM, prompts: list[list[int]]) -> None:
    assert llm.tokenizer is not None
    prompt, body = PROMPTS[0], "    a = 1\n\n    def f(self):\n        return self.a\n\n    def g(s"
    assert is_python(prompt, body)
    assert not is_python(prompt, "")
    assert not is_python(prompt, body.replace("    ", ""))
    assert not is_python(prompt, "    a = 1\n    b = 2\n    The settings of a program.\n" * 3)
    assert not is_python(prompt, llm.tokenizer.decode(range(1000, 1200)))
    shuffled = sorted(prompts[0])
    assert not is_python(prompt, llm.tokenizer.decode(shuffled))


def test_the_package_stays_small() -> None:
    home = packaged_model()
    sizes = {str(path.relative_to(home)): path.stat().st_size for path in home.rglob("*.*")}
    assert {"target/model.safetensors", "drafter/model.safetensors"} <= set(sizes)
    assert max(sizes.values()) <= MOST_FILE
    assert sum(sizes.values()) <= MOST_TOGETHER
