"""logit_edits: the reference against the definition, the kernels against the reference, and every
row of a tree against plain decoding along its path. Bits throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from kdtree_engine.errors import OptionError
from kdtree_engine.kernels import logit_edits
from kdtree_engine.kernels.logit_edits import LENGTH, PHRASES, EditState, edit_logits, remember
from kdtree_engine.kernels.logit_edits import cases as edit_cases
from kdtree_engine.kernels.logit_edits.cases import CASES, Case, Inputs
from kdtree_engine.sampling import Edits, check_edits, place_edits

pytest.importorskip("triton")

VOCAB = 70
STOPS = (3, 9, VOCAB + 5)
# short texts over few tokens: they repeat, and phrases come about
SMALL = [name for name in CASES if name != "kimi"]


def small(name: str, seed: int = 0) -> Inputs:
    """A case cut down to a few rows, the interpreter being slow; "word" to one full tree."""
    case = CASES[name]
    if name == "word":
        return edit_cases.inputs(case._replace(trees=1, vocab=200), seed)
    rows = max(1, min(case.rows, 9 // case.trees))
    return edit_cases.inputs(case._replace(rows=rows, vocab=min(case.vocab, 300)), seed)


def kernel_edits(*inputs: object, chunk: int = 256) -> Tensor:
    return logit_edits._launch_edits(*inputs, chunk=chunk)  # type: ignore[arg-type]


def copy_of(state: EditState) -> EditState:
    return EditState(*(value.clone() for value in vars(state).values()))


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Where bits differ, those of NaN and of zeros included."""
    assert one.shape == other.shape and one.dtype == other.dtype == torch.float32
    return one.view(torch.int32) != other.view(torch.int32)


def same_state(one: EditState, other: EditState) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def define(
    row: np.ndarray, edits: Edits, prompt: list[int], emitted: list[int], stops: tuple[int, ...]
) -> np.ndarray:
    """The definition, token by token, from the whole text."""
    out = row.copy()
    r, f, p = (np.float32(x) for x in (edits.repetition, edits.frequency, edits.presence))
    for token, x in enumerate(row):
        if not np.isfinite(x):
            continue
        count = emitted.count(token)
        if r != 1 and (count or token in prompt):
            x = x / r if x > 0 else x * r
        if count and f:
            x = x - f * np.float32(count)
        if count and p:
            x = x - p
        if edits.bias.get(token):
            x = x + np.float32(edits.bias[token])
        text = [*prompt, *emitted, token]
        forbidden = edits.allowed is not None and token not in edits.allowed
        forbidden |= token in stops and len(emitted) < edits.min_tokens
        forbidden |= any(text[-len(words) :] == list(words) for words in edits.bad)
        out[token] = -np.inf if forbidden else x
    return out


FEW = some.integers(0, 7)
TEXTS = some.lists(FEW, max_size=24)
EDITS = some.builds(
    Edits,
    repetition=some.sampled_from((1.0, 1.3, 0.7)),
    frequency=some.sampled_from((0.0, 0.1, -0.7)),
    presence=some.sampled_from((0.0, 0.3, -1.1)),
    bias=some.dictionaries(FEW, some.sampled_from((0.0, 0.7, -3.3, 100.0)), max_size=4),
    allowed=some.none() | some.lists(some.integers(0, VOCAB - 1), min_size=1, max_size=30),
    bad=some.lists(some.lists(FEW, min_size=1, max_size=4) | TEXTS.map(lambda x: x[:16] or [1])),
    min_tokens=some.integers(0, 12),
)
PARENTS = some.lists(some.integers(0, 100), max_size=9)


class Tree:
    """Rows below a root, from the parents' numbers modulo the rows that are there."""

    def __init__(self, parents: list[int], tokens: list[int]) -> None:
        self.parents = [-1, *(parent % (row + 1) for row, parent in enumerate(parents))]
        self.tokens = [1, *tokens]  # the root's is not read

    def path(self, row: int) -> list[int]:
        """Rows from the root's child down to `row`."""
        return [] if row == 0 else [*self.path(self.parents[row]), row]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, ancestors, depths [1, N]."""
        rows = range(len(self.parents))
        bits = [sum(1 << j for j in {*self.path(row), row, 0}) for row in rows]
        words = [one - 2**64 if one >= 2**63 else one for one in bits]
        depths = [len(self.path(row)) for row in rows]
        return torch.tensor([self.tokens]), torch.tensor([words]), torch.tensor([depths])


def some_logits(rows: int) -> Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 4
    logits[:, 5] = -0.0
    logits[:, 6] = torch.tensor([torch.inf, -torch.inf, torch.nan]).repeat(rows)[:rows]
    return logits


@settings(max_examples=120, deadline=None)
@given(EDITS, TEXTS, TEXTS, PARENTS, some.randoms(use_true_random=False))
def test_the_reference_is_the_definition(
    edits: Edits, prompt: list[int], emitted: list[int], parents: list[int], random: object
) -> None:
    tokens = [random.randint(0, 7) for _ in parents]  # type: ignore[attr-defined]
    tree = Tree(parents, tokens)
    state = place_edits(edits, prompt, emitted, STOPS, VOCAB)
    logits = some_logits(len(parents) + 1)
    got = edit_logits(logits, state, torch.tensor([0]), *tree.tensors())
    for row in range(len(parents) + 1):
        text = [*emitted, *(tree.tokens[node] for node in tree.path(row))]
        want = torch.from_numpy(define(logits[row].numpy(), edits, prompt, text, STOPS))
        assert not differs(got[row], want).any(), f"row {row} of {tree.parents}"


@settings(max_examples=60, deadline=None)
@given(EDITS, TEXTS, TEXTS, some.lists(TEXTS, max_size=4))
def test_remembering_is_the_same_as_having_known(
    edits: Edits, prompt: list[int], emitted: list[int], steps: list[list[int]]
) -> None:
    """Steps of several tokens, some longer than `recent`, and padded ones."""
    state = place_edits(edits, prompt, emitted, STOPS, VOCAB)
    for step in steps:
        padded = torch.tensor([[*step, 6, 6, 6]])
        remember(state, torch.tensor([0]), padded, torch.tensor([len(step)]))
    text = [*emitted, *(token for step in steps for token in step)]
    known = place_edits(edits, prompt, text, STOPS, VOCAB)
    if not bool(known.active[0]):
        known = place_edits(edits, prompt, emitted, STOPS, VOCAB)  # nothing was written
    assert same_state(state, known)


@pytest.mark.parametrize("name", SMALL)
def test_kernel(name: str) -> None:
    inputs = small(name)
    want = edit_logits(*inputs)
    assert not differs(kernel_edits(*inputs), want).any()
    changed = differs(want, inputs.logits).any(1)
    assert bool(changed.any()) == (name != "off")
    for tree, place in enumerate(inputs.places.tolist()):
        if not inputs.state.active[place]:
            nodes = inputs.tokens.shape[1]
            assert not changed[tree * nodes : (tree + 1) * nodes].any()


def test_every_setting_of_the_cases_counts() -> None:
    """Without it rows come out otherwise; and a tree's deeper rows are not edited like its root."""
    case = Case(2, 12, 300, 5, (1.3,), (0.37,), (-0.2,), 0.1, (4, 2), 64)
    inputs = edit_cases.inputs(case, 3)
    whole = edit_logits(*inputs)
    off = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0, "bias": 0.0, "quiet": 0}
    for name, value in {**off, "phrases": -1}.items():
        state = copy_of(inputs.state)
        getattr(state, name).fill_(value)
        assert differs(edit_logits(inputs.logits, state, *inputs[2:]), whole).any(), name
    rows = edit_logits(torch.ones_like(inputs.logits), *inputs[1:])
    assert differs(rows[1], rows[0]).any() and differs(rows[11], rows[1]).any()


@pytest.mark.parametrize("name", ["all", "root"])
def test_neither_chunk_nor_company_changes_a_bit(name: str) -> None:
    inputs = edit_cases.inputs(CASES[name]._replace(trees=2, rows=min(CASES[name].rows, 3)), 1)
    want = kernel_edits(*inputs)
    assert not differs(kernel_edits(*inputs, chunk=1024), want).any()
    nodes = inputs.tokens.shape[1]
    last = [value[-1:] for value in inputs[2:]]
    alone = kernel_edits(inputs.logits[-nodes:], inputs.state, *last)
    assert not differs(alone, want[-nodes:]).any()
    wide = torch.randn(len(want), inputs.logits.shape[1] + 3)
    wide[:, :-3] = inputs.logits
    assert not differs(kernel_edits(wide[:, :-3], *inputs[1:]), want).any()


@pytest.mark.parametrize(
    ("name", "rows", "launch"),
    [("all", 40, False), ("word", 64, False), ("phrases", 37, False), ("all", 5, True)],
)
def test_a_row_of_a_tree_is_plain_decoding(name: str, rows: int, launch: bool) -> None:
    """Walk to every row, remembering its path token by token; then a tree of the root alone."""
    case = CASES[name]._replace(trees=2, rows=rows, vocab=200, inactive=0)
    inputs = edit_cases.inputs(case, 5)
    edit = kernel_edits if launch else edit_logits
    keep = logit_edits._launch_remember if launch else remember
    edited = edit(*inputs)
    seen = 0
    for tree in range(len(inputs.tokens)):
        place = inputs.places[tree : tree + 1]
        for row in range(rows):
            bits = int(inputs.ancestors[tree, row])
            if row and not bits & 1:
                continue  # padding
            state = copy_of(inputs.state)
            for node in (node for node in range(1, rows) if bits >> node & 1):
                keep(state, place, inputs.tokens[tree, node].view(1, 1), torch.tensor([1]))
            alone = torch.tensor([[-1]]), torch.tensor([[1]]), torch.tensor([[0]])
            here = slice(tree * rows + row, tree * rows + row + 1)
            plain = edit(inputs.logits[here], state, place, *alone)
            assert not differs(plain, edited[here]).any(), f"row {row} of tree {tree}"
            seen += 1
    assert seen > rows  # the first tree is full


def test_remember_kernel() -> None:
    """The dummy place several times, an inactive place, steps longer than `recent`."""
    case = Case(4, 1, 300, 5, (1.3,), (0.3,), phrases=20, quiet=(7,))
    state = edit_cases.inputs(case).state
    dummy = 4
    state.active[2] = False
    other, first = copy_of(state), copy_of(state)
    places = torch.tensor([3, dummy, 0, 2, dummy, 1])
    lengths = torch.tensor([1, 0, 22, 3, 0, 0])
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        emitted = torch.randint(0, 5, (6, 24), generator=generator)
        emitted[0, 0] = 4
        remember(state, places, emitted, lengths)
        logit_edits._launch_remember(other, places, emitted, lengths)
        assert same_state(state, other)
    for place in (1, 2, dummy):
        for name, value in vars(state).items():
            assert torch.equal(value[place], vars(first)[name][place]), name
    assert state.quiet.tolist()[:4] == [7 - 66, 7, 7, 4]
    assert state.recent[3, :3].tolist() == [4, 4, 4]
    assert int((state.words - first.words).sum()) == 3 * 23


@pytest.mark.parametrize("edit", [edit_logits, kernel_edits])
def test_settings_that_are_off_change_no_bit(edit: Callable[..., Tensor]) -> None:
    """An active place whose every setting is off, and a place that is not active but has some."""
    inputs = edit_cases.inputs(Case(2, 3, 300, 4))
    assert bool(inputs.state.active[:2].all())
    logits = inputs.logits
    logits.view(torch.int32)[0, :2] = torch.tensor([0x7FC12345, -0x00000001], dtype=torch.int32)
    assert (logits == 0).any() and torch.signbit(logits[logits == 0]).any()
    assert not differs(edit(*inputs), logits).any()
    busy = edit_cases.inputs(Case(1, 3, 300, 4, (1.3,), (0.1,), (0.3,), 0.5, (9,), 9))
    assert differs(edit(*busy), busy.logits).any()
    busy.state.active.fill_(False)
    assert not differs(edit(*busy), busy.logits).any()


@pytest.mark.parametrize("edit", [edit_logits, kernel_edits])
def test_broken_logits_stay(edit: Callable[..., Tensor]) -> None:
    """A forbidden token of a broken row is still NaN or +inf: the sampler must see it."""
    edits = Edits(1.2, 0.1, 0.1, {1: 5.0}, allowed=[1], bad=[[2, 3]], min_tokens=5)
    state = place_edits(edits, [2], [1, 2], (4,), VOCAB)
    tree = Tree([0], [2])
    logits = torch.ones(2, VOCAB)
    logits[:, [1, 2, 3, 4, 7]] = torch.tensor([torch.nan, torch.inf, torch.nan, torch.inf, -3e38])
    got = edit(logits, state, torch.tensor([0]), *tree.tensors())
    assert torch.equal(got.isnan(), logits.isnan())
    assert torch.equal(got == torch.inf, logits == torch.inf)
    assert bool((got[:, 5:] == -torch.inf).all())


@pytest.mark.parametrize("launch", [False, True])
def test_ids_beyond_the_vocabulary_touch_nobody(launch: bool) -> None:
    """The engine refuses them; were one to get through, another place's memory stays whole."""
    state = edit_cases.inputs(Case(3, 1, 130, 5, (1.3,), (0.1,), phrases=9)).state
    edit, keep = (kernel_edits, logit_edits._launch_remember) if launch else (edit_logits, remember)
    before = copy_of(state)
    bad = torch.tensor([[130, -1, -7, 2**31 - 1]])
    keep(state, torch.tensor([1]), bad, torch.tensor([4]))
    assert torch.equal(state.words, before.words)
    state.phrases[1].fill_(-1)
    state.phrases[1, :3, 0] = torch.tensor([130, 131, 2**31 - 1], dtype=torch.int32)
    tokens = torch.tensor([[-1, 130, -5, 200]])
    ancestors, depths = torch.tensor([[1, 3, 7, 15]]), torch.tensor([[0, 1, 2, 3]])
    logits = torch.randn(130).expand(4, 130)
    got = edit(logits, state, torch.tensor([1]), tokens, ancestors, depths)
    assert not differs(got, got[:1].expand_as(got).contiguous()).any()  # as if they were not there
    assert differs(got, logits.contiguous()).any()


def test_settings_out_of_range_are_refused() -> None:
    check_edits(Edits(), VOCAB)
    check_edits(Edits(1.1, -2, 2, {0: -100, VOCAB - 1: 100}, [1], [[2], [1] * LENGTH], 9), VOCAB)
    wrong = {
        "repetition_penalty 0.0 must be from 0.01": Edits(repetition=0.0),
        "repetition_penalty nan": Edits(repetition=float("nan")),
        "frequency_penalty 2.5": Edits(frequency=2.5),
        "presence_penalty nan": Edits(presence=float("nan")),
        "min_tokens -1": Edits(min_tokens=-1),
        "bias 101": Edits(bias={1: 101}),
        "bias nan": Edits(bias={1: float("nan")}),
        f"logit_bias: token {VOCAB} is outside": Edits(bias={VOCAB: 1}),
        "bad_words: token -1 is outside": Edits(bad=[[1, -1]]),
        "allowed_token_ids: token 99 is outside": Edits(allowed=[99]),
        "a word of 0 tokens": Edits(bad=[[]]),
        "a word of 17 tokens": Edits(bad=[[1] * 17]),
        f"{PHRASES + 1} sequences": Edits(bad=[[1, 2]] * (PHRASES + 1)),
        "leave no token": Edits(allowed=[5], bad=[[5]]),
        "leave no token that": Edits(allowed=[]),
    }
    for message, edits in wrong.items():
        with pytest.raises(OptionError, match=message):
            check_edits(edits, VOCAB)
    assert not bool(place_edits(Edits(), [1], [2], STOPS, VOCAB).active[0])
    assert bool(place_edits(replace(Edits(), min_tokens=1), [], [], (), VOCAB).active[0])
