"""The exactness contract as a test: whatever the engine does beside it, a token's logits are those
of plain decoding, to the bit (docs/exactness.md).

A **case** is one point of the axes below: an engine, and up to four requests that join it at
different steps. Its truth is plain decoding: no drafts, one request alone, prompt chunks of 512,
pages in order, nothing in the prefix cache. Every emitted token, and the logits row that chose it,
must equal the truth's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from e2e.covering import Axes, Row, covering_array
from e2e.drive import Job, MakeDrafter, Run, make_engine, pages_of, run_jobs, scramble
from e2e.models import MODELS, Loaded, Models
from kdtree_engine import SamplingParams
from kdtree_engine.config import PAGE_SIZE, EngineConfig
from kdtree_engine.drafter.dflash import DFlashDrafter
from kdtree_engine.drafter.ngram import NgramDrafter
from kdtree_engine.drafter.none import NoDrafter
from kdtree_engine.drafter.random import RandomDrafter
from kdtree_engine.drafter.replay import ReplayDrafter
from kdtree_engine.engine.request import StepTrace, TokenLogProb

MAIN_AXES: Axes = {  # `make exact` runs their full product
    "model": MODELS,
    "nodes": (0, 1, 2, 7, 15, 63, "chain"),
    "drafter": ("none", "ngram", "random", "replay", "dflash"),
    "sampling": ("greedy", "p90", "p95"),
}
OTHER_AXES: Axes = {
    "dtype": ("float32", "bfloat16"),
    "requests": (1, 2, 3, 4),
    "chunk": (1, 7, 64, 512),
    "lengths": ("short", "page", "tiles", "block", "mixed"),
    "prefix": ("miss", "prompt", "decoded"),
    "pages": ("ordered", "scrambled"),
    "options": ("none", "penalties", "forbidden", "log_probs", "stops"),
}
AXES: Axes = {**MAIN_AXES, **OTHER_AXES}

# Prompt tokens of each length class, and how many more a prompt may have. The last is for
# `prompt_violations` only.
SHORTEST = {"short": 1, "page": 62, "tiles": 127, "block": 510, "blocks": 1022}
SPREAD = {"short": 4, "page": 4, "tiles": 3, "block": 4, "blocks": 4}
MIXED = ("short", "page", "tiles", "block")
TOP_P = {"p90": 0.9, "p95": 0.95}
CHAIN = 7
MOST_NEW = 16  # tokens that a request generates at most
PLACES = 3  # requests running at once, so that a fourth waits until one leaves


def allowed(row: Row) -> bool:
    """Prompts under a page have no page to find. Long ones go token by token only after a hit, for
    the time they take (`prompt_violations` has them).
    """
    lengths, prefix = row.get("lengths"), row.get("prefix")
    if lengths == "short" and prefix in ("prompt", "decoded"):
        return False
    return not (row.get("chunk") == 1 and lengths in ("block", "mixed") and prefix == "miss")


@dataclass(frozen=True)
class Case:
    """One point of `AXES`. seed: draws lengths, join steps, page order. variant: which prompts.
    like: draws lengths and join steps as the case of that seed does, None for its own.
    """

    model: str
    nodes: int | str
    drafter: str
    sampling: str
    dtype: str
    requests: int
    chunk: int
    lengths: str
    prefix: str
    pages: str
    seed: int = 0
    variant: int = 0
    options: str = "none"
    like: int | None = None

    def __str__(self) -> str:
        return " ".join(f"{axis}={value}" for axis, value in vars(self).items())


def covering_cases() -> list[Case]:
    """A case for every row of a covering array over all axes."""
    return [Case(**row, seed=seed) for seed, row in enumerate(covering_array(AXES, allowed))]


def product_cases() -> Iterator[Case]:
    """Every point of `MAIN_AXES` with a covering array over the other axes, each drafter
    on prompts of its own. Requests with options are the same for all numbers of nodes: what plain
    decoding says under them is nobody else's.
    """
    others = covering_array(OTHER_AXES, allowed)
    points = product(*MAIN_AXES.values())
    firsts: dict[tuple[Any, ...], int] = {}
    for seed, (point, other) in enumerate(product(points, others)):
        main = dict(zip(MAIN_AXES, point, strict=True))
        alike = (*(main[axis] for axis in MAIN_AXES if axis != "nodes"), *other.values())
        like = None if other["options"] == "none" else firsts.setdefault(alike, seed)
        variant = MAIN_AXES["drafter"].index(main["drafter"])
        yield Case(**main, **other, seed=seed, variant=variant, like=like)


@dataclass(frozen=True, eq=False)
class Truth:
    """Plain decoding: tokens are prompt and output, logits[i] chose tokens[prompt + i]; told: what
    it was told of their likelihoods.
    """

    tokens: list[int]
    prompt: int
    logits: Tensor
    seed: int
    told: tuple[list[TokenLogProb], list[TokenLogProb]] = ([], [])


@dataclass(frozen=True)
class Violation:
    """The first token of a request that is not the truth's, or whose logits are not."""

    case: str
    request: str
    position: int
    what: str

    def __str__(self) -> str:
        return f"[{self.case}] request {self.request}, position {self.position}: {self.what}"


@dataclass(frozen=True)
class Report:
    """Outcome of a case. tokens: compared. accepted: (depth, sibling rank) of accepted drafts.
    preemptions: of all requests together.
    """

    tokens: int
    violations: list[Violation]
    accepted: list[tuple[int, int]]
    preemptions: int = 0


class Contract:
    """Runs cases on loaded models; plain answers are kept, so that many cases share them.
    eager: nothing is captured on CUDA either.
    """

    def __init__(self, models: Models, eager: bool = False) -> None:
        self.models = models
        self.eager = eager
        self._truths: dict[tuple[Any, ...], Truth] = {}

    def truth(self, case: Case, lengths: str, index: int) -> Truth:
        """Plain decoding of prompt `index` of a length class, far enough for every prompt of it."""
        key = (case.model, case.dtype, case.sampling, case.variant, lengths, index)
        if key not in self._truths:
            loaded = self.models.load(case.model, case.dtype)
            seed = 100 * case.variant + 10 * list(SHORTEST).index(lengths) + index
            prompt = loaded.prompt(SHORTEST[lengths], seed)
            params = sampling_params(case.sampling, SPREAD[lengths] + MOST_NEW, seed)
            self._truths[key] = plain_truth(loaded, prompt, params, seed)
        return self._truths[key]

    def truth_with_options(self, case: Case, job: Job, truth: Truth) -> Truth:
        """Plain decoding of this very prompt under the job's options, as far as any job goes."""
        key = (case.model, case.dtype, tuple(job.prompt), repr(job.params))
        if key not in self._truths:
            loaded = self.models.load(case.model, case.dtype)
            self._truths[key] = plain_truth(loaded, job.prompt, job.params, truth.seed)
        return self._truths[key]

    def check(self, case: Case) -> Report:
        """Run a case and compare every token with its truth."""
        loaded = self.models.load(case.model, case.dtype)
        known = [self.truth(case, *which) for which in _prompts(case)]
        jobs = _jobs(case, known)
        earlier = _earlier_jobs(case, known, jobs)
        truths = list(known)
        for index, (job, truth) in enumerate(zip(jobs, known, strict=True)):
            if case.options != "none" and index % 3 < 2:  # the third has none, but such company
                scores_prompt = case.prefix == "miss"
                params = with_options(
                    case.options, job, truth, scores_prompt, job.params.max_tokens
                )
                jobs[index] = replace(job, params=params)
                if case.options == "stops":  # they cut plain decoding's text, and change nothing
                    truths[index] = cut_at(truth, job, params)
                else:
                    truths[index] = self.truth_with_options(case, jobs[index], truth)
        chain = case.nodes == "chain"
        config = EngineConfig(
            CHAIN if chain else int(case.nodes),
            chain,
            case.chunk,
            pages_of([*jobs, *earlier]) + 2,
            min(case.requests, PLACES),
            self.eager,
        )
        answers = [truth.tokens for truth in truths]
        make = drafter_maker(case.drafter, loaded, answers, case.seed)
        engine = make_engine(loaded, make, config, drafts=case.drafter == "dflash")
        if case.pages == "scrambled":
            scramble(engine, case.seed)
        engine.scheduler.prefill_chunk = 64 if case.chunk == 512 else 512
        before = run_jobs(engine, earlier)
        engine.scheduler.prefill_chunk = case.chunk
        runs = run_jobs(engine, jobs)
        for job, run in zip(jobs, runs, strict=True):
            missed = case.prefix == "miss" or job.params.prompt_logprobs is not None
            found = 0 if missed else (len(job.prompt) - 1) // PAGE_SIZE * PAGE_SIZE
            assert run.request.stats.cached_tokens == found, f"{case}: prefix cache"
        named = [
            *zip([f"earlier {index}" for index in range(len(before))], before, known, strict=False),
            *zip([str(index) for index in range(len(runs))], runs, truths, strict=True),
        ]
        found_ones = [first_difference(str(case), *item) for item in named]
        return Report(
            sum(len(run.tokens) for _, run, _ in named),
            [violation for violation in found_ones if violation is not None],
            [pair for _, run, _ in named for trace in run.traces for pair in accepted_pairs(trace)],
        )


def plain_truth(loaded: Loaded, prompt: Sequence[int], params: SamplingParams, seed: int) -> Truth:
    """Decode a prompt plainly, in an engine of its own; on CUDA with nothing captured."""
    job = Job(prompt, params)
    config = EngineConfig(
        0, prefill_chunk=512, cache_pages=pages_of([job]), max_requests=1, eager=True
    )
    [run] = run_jobs(make_engine(loaded, lambda _: NoDrafter(), config), [job])
    return Truth([*prompt, *run.tokens], len(prompt), torch.stack(run.logits), seed, run.told)


def sampling_params(sampling: str, new: int, seed: int) -> SamplingParams:
    """Settings of a request; the seed belongs to its prompt."""
    if sampling == "greedy":
        return SamplingParams(new, ignore_eos=True)
    return SamplingParams(
        new, temperature=1.0, top_p=TOP_P[sampling], seed=1000 + seed, ignore_eos=True
    )


def with_options(
    options: str, job: Job, truth: Truth, scores_prompt: bool, least: int
) -> SamplingParams:
    """The job's settings with some of `OTHER_AXES["options"]`, which change what plain decoding
    says: what it says without them is forbidden in part. least: `min_tokens`.
    """
    if options == "none":
        return job.params
    if options == "log_probs":
        return replace(job.params, logprobs=3, prompt_logprobs=2 if scores_prompt else None)
    said = truth.tokens[len(job.prompt) :]
    if options == "stops":
        return replace(job.params, stop_token_ids=[said[job.params.max_tokens // 2]])
    if options == "penalties":
        return replace(
            job.params, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3
        )
    return replace(
        job.params,
        bad_words=[said[:1], said[2:4], [*job.prompt[-1:], said[1]]],
        logit_bias={said[3]: -2.0, said[4]: 1.5},
        stop_token_ids=said[5:8],
        min_tokens=least,
    )


def cut_at(truth: Truth, job: Job, params: SamplingParams) -> Truth:
    """Plain decoding of the job's prompt up to its first stop token."""
    first = next(
        place
        for place in range(len(job.prompt), len(truth.tokens))
        if truth.tokens[place] in (params.stop_token_ids or ())
    )
    return replace(truth, tokens=truth.tokens[: first + 1])


def first_difference(
    case: str, name: str, run: Run, truth: Truth, whole: bool = True
) -> Violation | None:
    """Compare what a request emitted with the truth that its prompt begins. whole: nobody cancelled
    it, so it ends where the truth does or at its last token.
    """
    start = run.request.prompt_tokens
    wanted = truth.tokens[start : start + run.request.most_tokens]
    for offset, (token, row, origin) in enumerate(
        zip(run.tokens, run.logits, run.origins, strict=True)
    ):
        if offset == len(wanted):
            return Violation(case, name, start + offset, f"token {token} after the stop; {origin}")
        expected = truth.logits[start - truth.prompt + offset]
        if token == wanted[offset] and torch.equal(row, expected):
            continue
        off = (row - expected).abs()
        what = (
            f"token {token}, plain decoding has {wanted[offset]}; {int((row != expected).sum())} "
            f"of {len(row)} logits differ, by {float(off.max()):.3g} at most; {origin}"
        )
        return Violation(case, name, start + offset, what)
    made, scored = run.told
    if made != truth.told[0][: len(run.tokens)] or scored != (
        truth.told[1] if whole else truth.told[1][: len(scored)]
    ):
        return Violation(case, name, start, "log-probabilities are not plain decoding's")
    if not whole or len(run.tokens) == len(wanted):
        return None
    what = f"ended early: {run.request.finish_reason}, {run.request.error}"
    return Violation(case, name, start + len(run.tokens), what)


def accepted_pairs(trace: StepTrace) -> Iterator[tuple[int, int]]:
    """(depth, rank among its siblings) of every draft that a step accepted."""
    parents = trace.tree.parents.tolist()
    for row in list(trace.path.indices)[1:]:
        yield int(trace.tree.depths[row]), parents[:row].count(parents[row])


def prompt_violations(contract: Contract, case: Case, chunks: Sequence[int]) -> Report:
    """Logits of every position of a prompt, as `LLM.logits` computes them: token by token, and in
    each of `chunks`; where plain decoding has said the prompt's end, its logits too.
    """
    loaded = contract.models.load(case.model, case.dtype)
    truth = contract.truth(case, case.lengths, 0)
    by_token: Tensor | None = None
    violations = []
    for chunk in (1, *chunks):
        job = Job(truth.tokens, SamplingParams())
        config = EngineConfig(0, prefill_chunk=chunk, cache_pages=pages_of([job]), max_requests=1)
        engine = make_engine(loaded, lambda _: NoDrafter(), config)
        if case.pages == "scrambled":
            scramble(engine, case.seed)
        request = engine.add(job.prompt, job.params, keep_logits=True)
        while request.is_prefill:
            engine.step()
        rows = torch.cat(request.logits)
        by_token = rows if by_token is None else by_token
        spoken = rows[truth.prompt - 1 : -1]
        for what, got, want, first in (
            ("token by token", rows, by_token, 0),
            ("plain decoding", spoken, truth.logits, truth.prompt - 1),
        ):
            wrong = (got != want).any(1).nonzero().flatten().tolist()
            if wrong or len(got) != len(want):
                text = f"prompt in chunks of {chunk}: {len(wrong)} rows differ from {what}"
                violations.append(Violation(str(case), "logits", first + wrong[0], text))
    return Report(len(truth.tokens) * (1 + len(chunks)), violations, [])


def _prompts(case: Case) -> list[tuple[str, int]]:
    """Length class and number of each request's prompt."""
    if case.lengths != "mixed":
        return [(case.lengths, index) for index in range(case.requests)]
    classes = MIXED if case.prefix == "miss" else MIXED[1:]
    return [(classes[(index + case.seed) % len(classes)], index) for index in range(case.requests)]


def _jobs(case: Case, truths: Sequence[Truth]) -> list[Job]:
    """The requests. A prompt may run into what plain decoding said next."""
    draw = random.Random(f"jobs {case.seed if case.like is None else case.like}")
    jobs = []
    for (lengths, index), truth in zip(_prompts(case), truths, strict=True):
        extra = draw.randint(0, SPREAD[lengths])
        if case.prefix != "miss":  # past the border, so that there is a page to find
            extra = SPREAD[lengths] - draw.randint(0, 1)
        params = sampling_params(case.sampling, draw.randint(MOST_NEW // 3, MOST_NEW), truth.seed)
        jobs.append(Job(truth.tokens[: truth.prompt + extra], params, draw.randint(0, 3) * index))
    return jobs


def _earlier_jobs(case: Case, truths: Sequence[Truth], jobs: Sequence[Job]) -> list[Job]:
    """Requests that leave the pages behind: the same prompts ("prompt"), or beginnings of them
    that decode past the page border ("decoded"), so that accepted drafts fill the page.
    """
    earlier = []
    for truth, job in zip(truths, jobs, strict=True) if case.prefix != "miss" else ():
        prompt, new = job.prompt, 1
        if case.prefix == "decoded":
            prompt, new = job.prompt[: truth.prompt], len(job.prompt) - truth.prompt + 1
        earlier.append(Job(prompt, sampling_params(case.sampling, new, truth.seed)))
    return earlier


def drafter_maker(
    drafter: str, loaded: Loaded, answers: Sequence[Sequence[int]], seed: int
) -> MakeDrafter:
    """A drafter by its name in `MAIN_AXES`; the replay drafter knows `answers`."""
    vocab = loaded.target.config.vocab_size
    makers: dict[str, MakeDrafter] = {
        "none": lambda pool: NoDrafter(),
        "ngram": lambda pool: NgramDrafter(),
        "random": lambda pool: RandomDrafter(vocab, seed=seed),
        "replay": lambda pool: ReplayDrafter(answers, vocab, seed=seed),
        "dflash": lambda pool: DFlashDrafter(loaded.network, loaded.target, pool),
    }
    return makers[drafter]
