"""Edited logits and log-probabilities on CUDA: bits against the CPU's, across numbers of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_engine.kernels import logit_edits
from kdtree_engine.kernels.logit_edits import EditState, cases, edit_logits, remember
from kdtree_engine.kernels.logit_edits.cases import CASES, Case, Inputs
from kdtree_engine.kernels.sample import reference as sample_reference
from kdtree_engine.kernels.sample import sample
from kdtree_engine.kernels.top_k import LOG_PROBS, _launch_log_probs, token_log_probs, top_log_probs

pytestmark = pytest.mark.gpu

VOCAB = 163_840
STEP = Case(
    20, 15, 20_011, 7, (1.1, 1.0, 0.7), (0.1, 0.0, -0.37), (0.2, -0.3), 0.1, (2, 0, 9), 64, 5
)


def on_device(inputs: Inputs) -> Inputs:
    """A copy; the state is written to."""
    state = EditState(*(value.cuda() for value in vars(inputs.state).values()))
    return Inputs(inputs.logits.cuda(), state, *(value.cuda() for value in inputs[2:]))


def same(one: Tensor, other: Tensor) -> bool:
    """The same bits, those of NaN included."""
    return torch.equal(one.cpu().view(torch.int32), other.cpu().view(torch.int32))


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_cpu(name: str) -> None:
    inputs = cases.inputs(CASES[name])
    given = on_device(inputs)
    want = edit_logits(*inputs)
    got = edit_logits(*given)
    assert same(got, want)
    assert same(given.logits, inputs.logits)  # the input is left alone
    for chunk, warps in ((1024, 4), (2048, 8), (4096, 8)):
        assert same(logit_edits._launch_edits(*given, chunk=chunk, warps=warps), want)


def test_rows_alone_and_in_company() -> None:
    """300 rows, then 64 and 1: a tree's first rows are a tree, and a root alone is one."""
    inputs = cases.inputs(STEP)
    given = on_device(inputs)
    want = edit_logits(*inputs)
    assert same(edit_logits(*given), want)
    nodes = inputs.tokens.shape[1]
    by_tree, logits = want.view(STEP.trees, nodes, -1), given.logits.view(STEP.trees, nodes, -1)
    for trees, rows in ((slice(3, 11), 8), (slice(4, 5), 1), (slice(0, 20), 1), (slice(7, 8), 15)):
        part = [value[trees, :rows] for value in given[3:]]
        got = edit_logits(
            logits[trees, :rows].flatten(0, 1), given.state, given.places[trees], *part
        )
        assert same(got, by_tree[trees, :rows].flatten(0, 1))


def test_remember() -> None:
    inputs = cases.inputs(STEP)
    given = on_device(inputs)
    generator = torch.Generator().manual_seed(1)
    places = torch.cat((inputs.places[:9], torch.full((3,), STEP.trees)))
    for most in (1, 8, 64):
        emitted = torch.randint(0, 7, (12, most), generator=generator)
        lengths = torch.randint(0, most + 1, (12,), generator=generator)
        lengths[9:] = 0
        remember(inputs.state, places, emitted, lengths)
        remember(given.state, places.cuda(), emitted.cuda(), lengths.cuda())
        for name, value in vars(inputs.state).items():
            assert torch.equal(getattr(given.state, name).cpu(), value), name


def test_a_captured_step() -> None:
    """Edits, choice and memory in a graph, replayed: what the same calls give on the CPU."""
    inputs = cases.inputs(Case(4, 16, 3072, 9, (1.2,), (0.1,), (0.2,), 0.1, (3,), 64, 3), 2)
    inputs.logits.nan_to_num_(0.0, 1.0, -1.0)
    given = on_device(inputs)
    lengths = torch.ones(4, dtype=torch.int64)
    moved = lengths.cuda()

    def step(on: Inputs, count: Tensor) -> Tensor:
        picks = edit_logits(*on).argmax(-1).view(4, 16)[:, :1].contiguous()
        remember(on.state, on.places, picks, count)
        return picks

    first = EditState(*(value.clone() for value in vars(given.state).values()))
    step(given, moved)
    for name, value in vars(first).items():
        getattr(given.state, name).copy_(value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picks = step(given, moved)
    for _ in range(5):
        graph.replay()
        assert torch.equal(picks.cpu(), step(inputs, lengths))
    assert torch.equal(given.state.words.cpu(), inputs.state.words)


def test_a_broken_row_is_seen() -> None:
    inputs = cases.inputs(Case(2, 4, 5000, 7, (1.2,), bias=0.9))
    inputs.logits.nan_to_num_(0.0, 1.0, -1.0)
    inputs.logits[2, 4], inputs.logits[5, 8] = torch.nan, torch.inf
    inputs.state.bias[:, [4, 8]] = -torch.inf
    edited = edit_logits(*on_device(inputs))
    rows = len(edited)
    zero, off = torch.zeros(rows, device="cuda"), torch.zeros(rows, dtype=torch.int64).cuda()
    settings = (zero, off, zero + 1, zero, off, off)
    finite = sample(edited, *settings).finite.tolist()
    assert [row for row in range(rows) if not finite[row]] == [2, 5]
    assert finite == sample_reference.sample(edited, *settings)[1].tolist()


def test_log_probs() -> None:
    """Against float64 and the CPU; 300, 64 and 1 rows give the same bits, and so does top_k."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(300, VOCAB, generator=generator, device="cuda") * 3
    logits[::3, 1000:] = -torch.inf
    ranks = torch.arange(300, device="cuda") % LOG_PROBS
    likeliest = logits.topk(LOG_PROBS).indices
    chosen = likeliest.gather(1, ranks[:, None])[:, 0]
    got = token_log_probs(logits, chosen)
    assert torch.equal(got.chosen, got.values.gather(1, ranks[:, None])[:, 0])
    total = torch.cat([part.double().logsumexp(-1) for part in logits.split(50)])
    want = logits.gather(1, got.tokens).double() - total[:, None]
    assert float((got.values - want).abs().max()) < 1e-5
    host = token_log_probs(logits[:8].cpu(), chosen[:8].cpu())
    assert torch.equal(host.tokens, got.tokens[:8].cpu())
    assert float((host.values - got.values[:8].cpu()).abs().max()) < 1e-5
    for part in (slice(0, 1), slice(17, 18), slice(100, 164)):
        for one, other in zip(token_log_probs(logits[part], chosen[part]), got, strict=True):
            assert torch.equal(one, other[part])
    listed = top_log_probs(logits[:64], LOG_PROBS)
    assert torch.equal(listed[0], got.values[:64]) and torch.equal(listed[1], got.tokens[:64])


def test_log_probs_of_a_part_of_a_tensor() -> None:
    """An odd vocabulary, so that rows begin anywhere in memory."""
    logits = torch.randn(9, 70_001, device="cuda")
    chosen = torch.arange(9, device="cuda")
    got = token_log_probs(logits, chosen)
    wide = torch.zeros(9, 70_005, device="cuda")
    wide[:, 3:-1] = logits
    for rows in (slice(0, 9), slice(1, 9), slice(2, 3)):
        for given in (logits[rows], wide[rows, 3:-1]):
            found = _launch_log_probs(given, chosen[rows], LOG_PROBS)
            for one, other in zip(found, got, strict=True):
                assert torch.equal(one, other[rows])
