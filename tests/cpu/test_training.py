"""Training of drafters: what a block sees, the loss, the data files, and a run that learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.drafter.base import DraftStates
from kdtree_engine.drafter.dflash import DFlashDrafter
from kdtree_engine.errors import KDTreeError, OptionError
from kdtree_engine.sampling import gumbel, seed_word
from kdtree_engine.training import TrainOptions, run, train_drafter
from kdtree_engine.training.blocks import BlockBatch, block_loss, run_blocks
from kdtree_engine.training.data import read_tokens
from kdtree_engine.training.lessons import Lesson, Lessons
from kdtree_engine.training.teacher import Teacher

LENGTH = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "model"
    make_checkpoint(path, "k2.6", seed=3, drafter=True, logit_std=2.0)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, drafter=folder / "drafter", tree_nodes=15)


def lesson_of(llm: LLM, tokens: torch.Tensor, taps: tuple[int, ...]) -> Lesson:
    teacher = Teacher(llm.engine.target, tokens.shape[0], tokens.shape[1], taps)
    return Lesson(*teacher.run(tokens))


def drafter_of(llm: LLM) -> DFlashDrafter:
    assert isinstance(llm.engine.drafter, DFlashDrafter)
    return llm.engine.drafter


def test_teacher_sees_what_the_engine_computes(llm: LLM) -> None:
    """Hidden states of a lesson give the logits of an ordinary prefill, up to bf16."""
    tokens = torch.randint(0, 160, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    lesson = lesson_of(llm, tokens, (1,))
    for row in range(2):
        hidden = lesson.hidden[row].float()
        target = llm.engine.target
        got = target.logits(target.norm(hidden), torch.arange(LENGTH))
        want = llm.logits(tokens[row].tolist())
        assert (got - want).abs().max() < 0.05 * want.std()
        assert (got.roll(1, 0) - want).abs().max() > want.std()


def test_a_trained_block_is_the_block_that_is_drafted(llm: LLM) -> None:
    """Training's masks and positions give what inference drafts at the same place."""
    drafter = drafter_of(llm)
    tokens = torch.randint(0, 160, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    lesson = lesson_of(llm, tokens, drafter.tap_layers)
    anchors = torch.tensor([[0, 1, 17, 63, 64, 80]])
    with torch.no_grad():
        blocks = run_blocks(drafter.model, llm.engine.target, lesson, anchors)
    for index, anchor in enumerate(anchors[0].tolist()):
        want = drafted_logits(llm, tokens[0, : anchor + 1].tolist())
        got = torch.log_softmax(blocks.logits[0, index], -1)
        assert (got - want).abs().max() < 0.05 * want.std(), anchor
        assert blocks.labels[0, index].tolist() == tokens[0, anchor + 1 : anchor + 8].tolist()


def drafted_logits(llm: LLM, prefix: list[int]) -> torch.Tensor:
    """Log-probabilities [7, V] that the engine drafts after `prefix`, its last token the root."""
    drafter, engine = drafter_of(llm), llm.engine
    request = None
    if len(prefix) > 1:  # the engine commits all but the root, and shows it to the drafter
        request = engine.add(prefix[:-1], SamplingParams(max_tokens=2, ignore_eos=True))
        while request.is_prefill:
            engine.step()
    pages = [0] if request is None else request.pages
    scores = proposed(drafter, prefix, pages)
    if request is not None:
        engine.cancel(request)
    return scores


def proposed(
    drafter: DFlashDrafter,
    text: list[int],
    pages: list[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> torch.Tensor:
    """Log-probabilities [7, V] of the block behind a text, its last token the root."""
    states = DraftStates(
        torch.tensor(text[-1:]),
        torch.tensor([len(text) - 1], dtype=torch.int32),
        torch.tensor([pages], dtype=torch.int32),
        torch.tensor([seed_word(seed)]),
        torch.tensor([temperature]),
    )
    with torch.inference_mode():
        blocks = drafter.propose(states, 160)
    return torch.empty(7, 160).scatter_(1, blocks.tokens[0], blocks.log_probs[0])


def test_blocks_do_not_see_each_other(llm: LLM) -> None:
    drafter = drafter_of(llm)
    tokens = torch.randint(0, 160, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    lesson = lesson_of(llm, tokens, drafter.tap_layers)
    with torch.no_grad():
        both = run_blocks(drafter.model, llm.engine.target, lesson, torch.tensor([[20, 23]]))
        alone = run_blocks(drafter.model, llm.engine.target, lesson, torch.tensor([[20]]))
    assert torch.allclose(both.logits[:, :1], alone.logits, atol=1e-4)


def test_loss_weighs_early_slots_more_and_mixes_both_targets() -> None:
    teacher = torch.full((1, 1, 3, 4), -50.0)
    teacher[..., 2] = 50.0  # the target is sure of token 2; the text went on with token 1
    labels = torch.ones(1, 1, 3, dtype=torch.int64)
    logits = torch.zeros(1, 1, 3, 4)

    def loss(slot: int, token: int, distil: float) -> float:
        better = logits.clone()
        better[0, 0, slot, token] = 3.0
        return float(block_loss(BlockBatch(better, labels, teacher), 2.0, distil))

    assert loss(0, 1, 0.0) < loss(1, 1, 0.0) < loss(2, 1, 0.0)
    assert loss(0, 1, 0.0) < loss(0, 2, 0.0) and loss(0, 2, 1.0) < loss(0, 1, 1.0)
    uniform = float(block_loss(BlockBatch(logits, labels, teacher), 2.0, 0.3))
    assert uniform == pytest.approx(np.log(4.0), abs=1e-5)


def test_lessons_hold_back_rows_and_refill(llm: LLM) -> None:
    tokens = np.random.default_rng(0).integers(0, 160, 60 * 32).astype(np.int32)
    teacher = Teacher(llm.engine.target, 4, 32, (1,))
    lessons = Lessons(tokens, teacher, 8 * teacher.bytes_per_sequence, seed=0, repeats=1)
    held = {tuple(row.tolist()) for lesson in lessons.held() for row in lesson.tokens}
    assert len(held) == 3
    seen = {tuple(row.tolist()) for _ in range(40) for row in lessons.next().tokens}
    assert not seen & held
    assert len(seen) > 16  # more than one pool of 8
    with pytest.raises(OptionError, match=r"has 600 tokens; sequences of 32 need at least 640"):
        Lessons(tokens[:600], teacher, 1, seed=0)


WRONG_IDS = {  # JSON, in line 2 of a file
    "huge": "[1000000000000]",
    "digits": f"[{10**4000}]",
    "negative": "[3, -1]",
    "null": "[null]",
    "float": "[2, 1.7]",
    "whole float": "[2.0]",
    "flag": "[true]",
    "text": '["7"]',
    "nested": "[[1, 2], [3, 4]]",
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    np.save(tmp_path / "rows.npy", np.array([[1, 2], [3, 4]], dtype=np.uint16))
    np.save(tmp_path / "floats.npy", np.array([0.5]))
    (tmp_path / "lines.jsonl").write_text('{"token_ids": [5, 6]}\n{"token_ids": []}\n')
    (tmp_path / "broken.jsonl").write_text('{"token_ids": [5]}\n{"ids": 3}\n')
    (tmp_path / "large.jsonl").write_text(json.dumps({"token_ids": [159, 160]}))
    (tmp_path / "text.py").write_text("print()\n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    np.save(tmp_path / "wide.npy", np.array([1, 2**32 + 5]))
    np.save(tmp_path / "unsigned.npy", np.array([2**64 - 1], dtype=np.uint64))
    np.save(tmp_path / "below.npy", np.array([[3, -1]]))
    (tmp_path / "empty.npy").write_bytes(b"")
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, a=np.zeros(1, dtype=np.int32))
    for name, ids in WRONG_IDS.items():
        (tmp_path / f"{name}.jsonl").write_text(f'{{"token_ids": [5]}}\n{{"token_ids": {ids}}}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    return {path.name: path for path in tmp_path.iterdir()}


def test_data_files(files: dict[str, Path]) -> None:
    chosen = [files["rows.npy"], files["lines.jsonl"]]
    assert read_tokens(chosen, None, 160, 9).tolist() == [1, 2, 3, 4, 5, 6, 9, 9]
    assert read_tokens(chosen, None, 160, None).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("floats.npy", "floats.npy: holds float64 values"),
        ("broken.jsonl", 'line 2: expected an object with "token_ids"'),
        ("large.jsonl", r"token ids outside the vocabulary \(0..159\)"),
        ("huge.jsonl", r"huge.jsonl, line 2: holds token ids outside the vocabulary \(0..159\)"),
        ("digits.jsonl", "digits.jsonl, line 2: holds token ids outside"),
        ("negative.jsonl", "negative.jsonl, line 2: holds token ids outside"),
        ("null.jsonl", 'null.jsonl, line 2: "token_ids" has None, expected whole numbers'),
        ("float.jsonl", 'float.jsonl, line 2: "token_ids" has 1.7, expected whole numbers'),
        ("whole float.jsonl", 'line 2: "token_ids" has 2.0, expected whole numbers'),
        ("flag.jsonl", 'flag.jsonl, line 2: "token_ids" has True, expected whole numbers'),
        ("text.jsonl", "text.jsonl, line 2: \"token_ids\" has '7', expected whole numbers"),
        ("nested.jsonl", r'line 2: "token_ids" has \[1, 2\], expected whole numbers'),
        ("deep.jsonl", "deep.jsonl, line 1: is not valid JSON"),
        ("wide.npy", "wide.npy: holds token ids outside the vocabulary"),
        ("unsigned.npy", "unsigned.npy: holds token ids outside the vocabulary"),
        ("below.npy", "below.npy: holds token ids outside the vocabulary"),
        ("empty.npy", "empty.npy: cannot be read as training data"),
        ("several.npy", "several.npy: holds several arrays"),
        ("text.py", "is text, but the model has no tokenizer"),
        ("latin.txt", "cannot be read as training data"),
        ("missing.npy", "cannot be read as training data"),
    ],
)
def test_wrong_data_files(files: dict[str, Path], name: str, message: str) -> None:
    path = files.get(name, files["rows.npy"].with_name(name))
    with pytest.raises(KDTreeError, match=message) as caught:
        read_tokens([path], None, 160, None)
    assert "\n" not in str(caught.value)


def test_the_out_folder_is_tried_before_any_work(
    folder: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be written is refused before the data is even read."""

    def read(*_: object) -> None:
        raise AssertionError("data was read first")

    monkeypatch.setattr(run, "read_tokens", read)
    options = TrainOptions(device="cpu", head_dim=16, taps=2)
    for out in (files["latin.txt"], files["latin.txt"] / "inside", Path("/proc/none/inside")):
        with pytest.raises(OptionError, match="cannot be written") as caught:
            train_drafter(folder, [files["rows.npy"]], out, options)
        assert str(out) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("null.jsonl", "expected whole numbers"), ("rows.npy", "need at least")],
)
def test_refused_data_leaves_no_folder(
    folder: Path, files: dict[str, Path], tmp_path: Path, name: str, message: str
) -> None:
    options = TrainOptions(device="cpu", head_dim=16, taps=2)
    there = tmp_path / "there"
    there.mkdir()
    for out in (tmp_path / "new" / "drafter", there):
        with pytest.raises(OptionError, match=message):
            train_drafter(folder, [files[name]], out, options)
    assert not (tmp_path / "new").exists()
    assert there.is_dir() and not any(there.iterdir())  # not ours to remove


def test_a_run_learns_and_its_drafter_loads(folder: Path, tmp_path: Path) -> None:
    """A text of one repeated phrase is learnt in some dozens of steps; the answer stays exact."""
    phrase = [7, 31, 9, 120, 55, 3, 88, 42]
    np.save(tmp_path / "phrase.npy", np.array(phrase * 320, dtype=np.uint16))
    options = TrainOptions(
        steps=250,
        layers=1,
        block_size=4,
        head_dim=16,
        length=64,
        batch=4,
        anchors=16,
        taps=2,
        learning_rate=5e-3,
        distil=0.0,
        device="cpu",
        seed=1,
    )
    out = tmp_path / "drafter"
    report = train_drafter(folder, [tmp_path / "phrase.npy"], out, options)
    assert report.steps == 250 and report.loss < 1.0 < np.log(160)
    assert (out / "config.json").is_file() and report.parameters > 0
    with pytest.raises(OptionError, match="exists and is not empty"):
        train_drafter(folder, [tmp_path / "phrase.npy"], out, options)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    plain = LLM(folder, drafter="none", tree_nodes=0).generate([phrase], params)
    drafted = LLM(folder, drafter=out, tree_nodes=7).generate([phrase], params)
    assert drafted[0].token_ids == plain[0].token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps 0 must be 1 or more"),
        ({"block_size": 1}, "block_size 1 must be 2 or more"),
        ({"length": 5000}, "length 5000 must be over the block size 8"),
        ({"decay": 0.0}, "decay 0.0 must be over 0 and at most 1"),
        ({"warm_up": 2.0}, "warm_up 2.0 must be over 0 and at most 1"),
        ({"gamma": 0.0}, "gamma 0.0 must be a number over 0"),
        ({"learning_rate": float("nan")}, "learning_rate nan must be over 0 and at most 1"),
        ({"seconds": -1.0}, "seconds -1.0 must be a number from 0 on"),
        ({"seconds": float("nan")}, "seconds nan must be a number from 0 on"),
        ({"weight_decay": float("nan")}, "weight_decay nan must be a number from 0 on"),
        ({"seed": 2**63}, "seed 9223372036854775808 must be from 0"),
        ({"seed": -1}, "seed -1 must be from 0"),
        ({"distil": 1.5}, "distil 1.5 must be between 0 and 1"),
        ({"kv_heads": 3, "heads": 4}, "4 heads cannot share 3"),
        ({"device": "tpu"}, "device 'tpu'"),
    ],
)
def test_wrong_options(folder: Path, tmp_path: Path, change: dict, message: str) -> None:
    np.save(tmp_path / "ids.npy", np.zeros(10, dtype=np.uint16))
    options = replace(TrainOptions(device="cpu", head_dim=16, taps=2), **change)
    with pytest.raises(OptionError, match=message):
        train_drafter(folder, [tmp_path / "ids.npy"], tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("steps", [2, 4])
def test_a_run_that_fails_writes_nothing(folder: Path, tmp_path: Path, steps: int) -> None:
    np.save(tmp_path / "ids.npy", np.arange(2000, dtype=np.uint16) % 160)
    options = TrainOptions(
        steps=steps, layers=1, block_size=4, head_dim=16, length=64, batch=1, anchors=4, taps=2,
        weight_decay=1e30, device="cpu", log_every=1,
    )  # fmt: skip
    with pytest.raises(OptionError, match=r"nothing was written: lower .* weight_decay \(1e\+30\)"):
        train_drafter(folder, [tmp_path / "ids.npy"], tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_drafts_foresee_the_noise_of_the_draw(llm: LLM) -> None:
    """At a temperature the best candidate is the draw's own argmax, with its seed and positions."""
    drafter, prefix = drafter_of(llm), [5]

    def candidates(temperature: float, seed: int) -> torch.Tensor:
        return proposed(drafter, prefix, [0], temperature, seed)

    marginals = candidates(0.0, 1)
    for temperature, seed in ((1.0, 1), (0.5, -3)):
        noise = gumbel(
            torch.full((7,), seed_word(seed)), torch.arange(1, 8), 160
        )  # the root stands at position 0
        want = torch.log_softmax(marginals / temperature + noise, -1)
        assert torch.allclose(candidates(temperature, seed), want, atol=1e-4)
    assert torch.equal(candidates(0.0, 2), marginals)
