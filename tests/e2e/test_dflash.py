"""The DFlash drafter inside the engine against the float64 golden model, and refused drafters."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_tools import (
    CheckpointMaker,
    copy,
    edit,
    golden_inputs,
    read_json,
    replace_tensors,
    stored_tensors,
)
from safetensors.torch import save_file
from torch import Tensor

from e2e.drive import Job, make_engine, pages_of, run_jobs
from e2e.models import Loaded
from golden import dflash as golden_draft
from golden import model as golden
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints import open_drafter, open_model
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.checkpoints.write import write_model
from kdtree_engine.config import EngineConfig
from kdtree_engine.drafter.base import DraftStates
from kdtree_engine.drafter.dflash import DFlashDrafter
from kdtree_engine.drafter.load import drafter_tensors, load_drafter
from kdtree_engine.drafter.none import NoDrafter
from kdtree_engine.errors import CheckpointError, ConfigError, DrafterError, KDTreeError
from kdtree_engine.model import load_target
from kdtree_engine.types import DraftBlock, DraftBlocks

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
EMBED = "embed_tokens.weight"
SLIDING, FULL = "sliding_attention", "full_attention"

# What the drafter's config says, as options of make_checkpoint and as edits of its config.json.
DRAFTERS: dict[str, tuple[Dims, dict[str, Any]]] = {
    "full": (Dims(), {}),
    "plain-rope": (Dims(yarn_factor=None), {}),
    "sliding": (Dims(drafter_layer_types=(SLIDING, FULL)), {}),
    "sliding-inside-the-block": (
        Dims(drafter_layer_types=(FULL, SLIDING), drafter_sliding_window=5),
        {},
    ),
    "window": (Dims(), {"dflash_config.draft_window": 20}),
    "amplitude": (Dims(), {"rope_scaling.attention_factor": 1.3}),
    "amplitude-by-formula": (Dims(), {"rope_scaling.mscale_all_dim": 0.5}),
    "block-of-2": (Dims(block_size=2), {}),
    "one-tap-one-layer": (Dims(taps=(3,), drafter_layers=1, drafter_kv_heads=4), {}),
    "taps-out-of-order": (Dims(taps=(2, 0)), {}),
}
MIXED = {"drafter_layer_types": (SLIDING, FULL), "drafter_sliding_window": 5}
DRAFTERS |= {
    "causal": (Dims(), {"is_causal": True}),
    "sliding-both-ways": (Dims(**MIXED, drafter_non_causal=True), {}),
    "nothing-causal": (Dims(**MIXED), {"is_causal": False}),
    "all-causal": (Dims(**MIXED), {"dflash_config.causal": True}),
}
SPECULATORS: dict[str, tuple[Dims, dict[str, Any]]] = {
    "speculators": (Dims(), {}),
    "speculators-reduced": (Dims(draft_vocab_size=96), {}),
    "speculators-sliding": (Dims(**MIXED, draft_vocab_size=61), {"draft_window": 20}),
    "speculators-sliding-both-ways": (Dims(**MIXED, drafter_non_causal=True), {}),
    "speculators-from-the-anchor": (Dims(sample_from_anchor=True, draft_vocab_size=96), {}),
}
DRAFTERS |= SPECULATORS
BY_DRAFTER = pytest.mark.parametrize("name", DRAFTERS)


@dataclass
class Recorder:
    """Stands before a drafter and notes what passes."""

    inner: Any
    asked: list[tuple[int, int]] = field(default_factory=list)  # root, context
    blocks: list[DraftBlock] = field(default_factory=list)
    taps: dict[int, Tensor] = field(default_factory=dict)  # by position

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, states: DraftStates, candidates: int) -> DraftBlocks:
        blocks: DraftBlocks = self.inner.propose(states, candidates)
        self.asked.append((int(states.roots), int(states.contexts)))
        self.blocks.append(DraftBlock(blocks.tokens[0], blocks.log_probs[0]))
        return blocks

    def observe(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        spill = self.inner.pool.layout.spill_slot
        for row, position, slot in zip(taps, positions.tolist(), slots.tolist(), strict=True):
            if slot >= spill:
                continue
            assert position == len(self.taps), "each position once, in order"
            self.taps[position] = row.clone()
        self.inner.observe(taps, positions, slots)


def make_folder(name: str, checkpoint: CheckpointMaker, tmp_path: Path) -> Path:
    dims, change = DRAFTERS[name]
    layout = "speculators" if name in SPECULATORS else "z-lab"
    made = checkpoint("k2.6", drafter=True, dims=dims, layout=layout)
    folder = copy(made, tmp_path / "model")
    if name in SPECULATORS:  # an embedding of its own, which the target's must not replace
        own = stored_tensors(folder / "drafter")["embed_tokens.weight"].roll(7, 1)
        replace_tensors(folder / "drafter", {"embed_tokens.weight": own})
    edit(folder / "drafter", change)
    return folder


def record(folder: Path) -> tuple[Recorder, list[int]]:
    """Run a request; everything that the drafter saw and said, and the whole text."""
    llm = LLM(folder, drafter=folder / "drafter", device="cpu", prefill_chunk=40)
    recorder = Recorder(llm.engine.drafter)
    llm.engine.drafter = recorder
    draw = random.Random(3)
    prompt = [draw.randrange(160) for _ in range(100)]
    [out] = llm.generate(prompt, GREEDY)
    llm.engine.check_integrity()
    return recorder, prompt + out.token_ids


def draft_config(folder: Path) -> dict[str, Any]:
    """The drafter's config in z-lab's words."""
    config = read_json(folder / "drafter")
    return golden_draft.flattened(config) if "speculators_model_type" in config else config


def golden_taps(folder: Path, text: list[int], shift: int = 0) -> np.ndarray:
    """[T, n * H]: outputs of the tapped layers, `shift` layers off."""
    layers = draft_config(folder)["dflash_config"]["target_layer_ids"]
    hidden = golden.forward(*golden_inputs(folder), text).hidden
    return np.concatenate([hidden[layer + shift] for layer in layers], 1)


def golden_log_probs(
    folder: Path,
    taps: np.ndarray,
    root: int,
    context: int,
    first_slot: int | None = None,
    **options: Any,
) -> np.ndarray:
    """[block - 1, V] of the block behind `context` tokens; `first_slot` stands in for the root."""
    raw, weights = golden_inputs(folder / "drafter")
    config, speculators = draft_config(folder), "speculators_model_type" in raw
    inner = config["dflash_config"]
    _, target = golden_inputs(folder)
    window = raw.get("draft_window") or inner.get("draft_window") or context
    first = max(0, context - window)
    slots = [root if first_slot is None else first_slot]
    slots += [inner["mask_token_id"]] * (config["block_size"] - 1)
    embedding = weights.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    if "causal" in inner:
        config = {**config, "is_causal": inner["causal"]}
    hidden = golden_draft.draft(
        config,
        weights,
        taps[first:context],
        np.arange(first, context),
        embedding[slots],
        context,
        window_of_each_slot=not speculators,
        **options,
    )
    head = weights.get("lm_head.weight", target["lm_head.weight"])
    logits = golden_draft.draft_logits(config, hidden, head)
    log_probs = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    if "d2t" not in weights:
        return log_probs
    return golden_draft.over_vocabulary(log_probs, weights["d2t"], len(embedding))


def worst(block: DraftBlock, want: np.ndarray) -> float:
    """Largest difference of the candidates' log-probabilities, and of the sorted best of all."""
    assert block.horizon == len(want)
    width = block.tokens.shape[1]
    of_candidates = np.take_along_axis(want, block.tokens.numpy(), 1) - block.log_probs.numpy()
    of_best = np.sort(want, 1)[:, ::-1][:, :width] - block.log_probs.numpy()
    return float(max(np.abs(of_candidates).max(), np.abs(of_best).max()))


@BY_DRAFTER
def test_drafts_equal_the_golden_drafter(
    name: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Every proposal of a request, from context behind a page border through many steps."""
    folder = make_folder(name, checkpoint, tmp_path)
    recorder, text = record(folder)
    taps = golden_taps(folder, text)
    assert len(recorder.blocks) > 5
    for (root, context), block in list(zip(recorder.asked, recorder.blocks, strict=True))[::3]:
        assert root == text[context]
        assert worst(block, golden_log_probs(folder, taps, root, context)) < TOLERANCE


@pytest.mark.parametrize("name", SPECULATORS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_speculators_drafter_changes_no_bit(
    name: str, temperature: float, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Tokens and the logits behind them are plain decoding's, with two requests at once."""
    folder = make_folder(name, checkpoint, tmp_path)
    cpu, draft_folder = torch.device("cpu"), folder / "drafter"
    target = load_target(open_model(folder), torch.float32, cpu)
    network = load_drafter(open_drafter(draft_folder), torch.float32, cpu, 4096)
    loaded = Loaded(folder, draft_folder, target, network)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=5)
    jobs = [Job(loaded.prompt(length, length), params, join=length % 3) for length in (70, 60)]
    config = EngineConfig(tree_nodes=15, cache_pages=pages_of(jobs) + 4)
    engine = make_engine(loaded, lambda pool: DFlashDrafter(network, target, pool), config, True)
    drafted = run_jobs(engine, jobs)
    plain = run_jobs(make_engine(loaded, lambda pool: NoDrafter(), config), jobs)
    assert sum(len(run.traces) for run in drafted) > 10
    assert max(trace.tree.nodes for run in drafted for trace in run.traces) == 15
    for one, other in zip(drafted, plain, strict=True):
        assert one.tokens == other.tokens
        assert all(map(torch.equal, one.logits, other.logits))
    if network.tokens is not None:
        known = set(network.tokens.tolist())
        trees = [trace.tree for run in drafted for trace in run.traces]
        assert all(set(tree.tokens[1:].tolist()) <= known for tree in trees)


@pytest.mark.parametrize("block_size", [2, 4])
def test_a_vocabulary_smaller_than_the_tree(block_size: int, checkpoint: CheckpointMaker) -> None:
    """Five tokens to guess from, sixty-three nodes to fill: the tree is smaller, the text plain."""
    dims = Dims(draft_vocab_size=5, block_size=block_size)
    folder = checkpoint("k2.6", drafter=True, dims=dims, layout="speculators")
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
    prompts = [list(range(50)), list(range(9))]
    llm = LLM(folder, drafter=folder / "drafter", device="cpu", tree_nodes=63)
    got = llm.generate(prompts, params)
    llm.engine.check_integrity()
    want = LLM(folder, drafter="none", device="cpu").generate(prompts, params)
    assert [one.token_ids for one in got] == [one.token_ids for one in want]


def test_a_head_of_its_own_is_kept(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Pain point 3: the target's head in place of the drafter's own guesses something else."""
    folder = make_folder("speculators", checkpoint, tmp_path)
    recorder, text = record(folder)
    (root, context), block = recorder.asked[0], recorder.blocks[0]
    taps = golden_taps(folder, text)
    assert worst(block, golden_log_probs(folder, taps, root, context)) < TOLERANCE
    for name, theirs in (
        ("lm_head.weight", "lm_head.weight"),
        (EMBED, "model.embed_tokens.weight"),
    ):
        mine = stored_tensors(folder / "drafter")[name]
        foreign = stored_tensors(folder)["language_model." + theirs]
        replace_tensors(folder / "drafter", {name: foreign})
        assert worst(block, golden_log_probs(folder, taps, root, context)) > 100 * TOLERANCE
        replace_tensors(folder / "drafter", {name: mine})


def test_torchspec_names(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """context_proj, context_norm and final_norm are fc, hidden_norm and norm."""
    home = checkpoint("k2.6", drafter=True) / "drafter"
    stored = stored_tensors(home)
    theirs = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    renamed = dict(stored)
    for name, other in theirs.items():
        renamed[f"{other}.weight"] = renamed.pop(f"{name}.weight")
    write_model(tmp_path, read_json(home), renamed)
    cpu = torch.device("cpu")
    out = drafter_tensors(load_drafter(open_drafter(tmp_path), torch.float32, cpu))
    assert out.keys() == stored.keys()
    assert all(torch.equal(out[name], stored[name].float()) for name in stored)


def test_copies_of_the_target_are_skipped(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    folder = make_folder("speculators-reduced", checkpoint, tmp_path)
    stored = stored_tensors(folder / "drafter")
    (folder / "drafter" / "model.safetensors").unlink()
    extra = {"verifier_lm_head.weight": stored["lm_head.weight"] + 1}
    save_file({**stored, **extra}, str(folder / "drafter" / "model.safetensors"))
    llm = LLM(folder, drafter=folder / "drafter", device="cpu")
    assert "skipped the drafter's copies of the target (verifier_lm_head.weight)" in llm.notes


def test_a_drafter_of_another_revision_is_warned_of(
    checkpoint: CheckpointMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy(checkpoint("k2.6", drafter=True), tmp_path / "Kimi-K2.6")
    draft = (folder / "drafter").rename(tmp_path / "Kimi-K2.5-DFlash")
    link = tmp_path / "latest"
    link.symlink_to(folder)
    said = "the drafter is for Kimi-K2.5, but the target is Kimi-K2.6"
    for path in (folder, link):
        caplog.clear()
        with caplog.at_level("WARNING", logger="kdtree_engine"):
            llm = LLM(path, drafter=draft, device="cpu")
        assert len(caplog.records) == 1  # and not once more among the notes
        assert caplog.records[0].getMessage().startswith(said)
        assert llm.notes == ("skipped 23 vision tensors",)
    right = draft.rename(tmp_path / "Kimi-K2.6-DFlash")
    assert LLM(folder, drafter=right, device="cpu").notes == ("skipped 23 vision tensors",)


@BY_DRAFTER
def test_taps_are_layer_outputs(name: str, checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Pain point 2: taps off by one layer lose acceptance silently."""
    folder = make_folder(name, checkpoint, tmp_path)
    recorder, text = record(folder)
    got = torch.stack([recorder.taps[position] for position in range(len(recorder.taps))]).numpy()
    assert len(got) == len(text) - 1  # all but the last token, which is still a root
    want = golden_taps(folder, text)[: len(got)]
    assert np.abs(got - want).max() < TOLERANCE * want.std()
    inputs = golden_taps(folder, text, shift=-1)[: len(got)]
    assert np.abs(got - inputs).max() > 0.1


def test_the_root_stands_in_slot_0(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Pain point 1: a MASK in slot 0 instead of the committed token drafts something else."""
    folder = make_folder("full", checkpoint, tmp_path)
    recorder, text = record(folder)
    taps = golden_taps(folder, text)
    (root, context), block = recorder.asked[0], recorder.blocks[0]
    assert worst(block, golden_log_probs(folder, taps, root, context)) < TOLERANCE
    masked = golden_log_probs(folder, taps, root, context, first_slot=158)
    assert worst(block, masked) > 100 * TOLERANCE


def test_the_amplitude_is_a_setting(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """Pain point 4: an explicit attention_factor overrides the formula, and it shows."""
    folder = make_folder("amplitude", checkpoint, tmp_path)
    recorder, text = record(folder)
    taps = golden_taps(folder, text)
    (root, context), block = recorder.asked[0], recorder.blocks[0]
    for amplitude, same in ((1.3, True), (1.0, False)):
        want = golden_log_probs(folder, taps, root, context, amplitude=amplitude)
        assert (worst(block, want) < TOLERANCE) == same
    assert worst(block, want) > 0.01


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_round_trip_of_the_weights(
    layout: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """drafter_tensors undoes load_drafter, and what it wrote loads again; t2d repeats d2t."""
    dims = Dims(drafter_kv_heads=1, draft_vocab_size=96 if layout == "speculators" else None)
    home = checkpoint("k2.6", drafter=True, dims=dims, layout=layout) / "drafter"
    cpu = torch.device("cpu")
    stored = stored_tensors(home)
    out = drafter_tensors(load_drafter(open_drafter(home), torch.float32, cpu))
    stored.pop("t2d", None)
    assert out.keys() == stored.keys()
    assert all(torch.equal(out[name].double(), stored[name].double()) for name in stored)
    halves = {name: tensor.to(stored[name].dtype) for name, tensor in out.items()}
    write_model(tmp_path, read_json(home), halves)
    again = drafter_tensors(load_drafter(open_drafter(tmp_path), torch.float32, cpu))
    assert all(torch.equal(again[name], out[name]) for name in out)


# ---------------------------------------------------------------------------- refused drafters

EDITS: dict[str, tuple[dict[str, Any], type[KDTreeError], str]] = {
    "mask id beyond the vocabulary": (
        {"dflash_config.mask_token_id": 160},
        DrafterError,
        "mask_token_id 160 is outside of the vocabulary of 160",
    ),
    "no mask id": ({"dflash_config.mask_token_id": None}, ConfigError, "mask_token_id"),
    "taps outside": (
        {"dflash_config.target_layer_ids": [0, 2, 4]},
        DrafterError,
        r"target_layer_ids \[4\] are outside of a target of 4 layers",
    ),
    "taps twice": ({"dflash_config.target_layer_ids": [1, 1, 2]}, DrafterError, "distinct"),
    "another depth of target": (
        {"num_target_layers": 5},
        DrafterError,
        "number of target layers is 5, but the target's is 4",
    ),
    "block of one": ({"block_size": 1}, DrafterError, "block_size 1 drafts nothing"),
    "vocabulary": ({"vocab_size": 163840}, DrafterError, "vocabulary size is 163840.*160"),
    "width of the weights": ({"hidden_size": 96}, CheckpointError, "do not match config.json"),
}


@pytest.mark.parametrize("mistake", EDITS)
def test_a_wrong_drafter_is_refused(
    mistake: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Pain point 18, among others: nothing falls back silently."""
    change, kind, message = EDITS[mistake]
    folder = copy(checkpoint("k2.6", drafter=True), tmp_path / "model")
    edit(folder / "drafter", change)
    with pytest.raises(kind, match=message) as caught:
        LLM(folder, drafter=folder / "drafter", device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"aux_hidden_state_layer_ids": [1, 2, 4]},
            r"aux_hidden_state_layer_ids \[4\] are outside.*input of target layer k, 1 to 3",
        ),
        (
            {"transformer_layer_config.vocab_size": 170},
            "vocabulary size is 170, but the target's is 160",
        ),
    ],
)
def test_a_wrong_speculators_drafter_is_refused(
    change: dict[str, Any], message: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    dims = Dims(draft_vocab_size=96)
    made = checkpoint("k2.6", drafter=True, dims=dims, layout="speculators")
    folder = copy(made, tmp_path / "model")
    stored = stored_tensors(folder / "drafter")
    for name in ("embed_tokens.weight", "t2d"):  # shaped by the vocabulary; neither is needed
        del stored[name]
    save_file(stored, str(folder / "drafter" / "model.safetensors"))
    edit(folder / "drafter", change)
    with pytest.raises(DrafterError, match=message) as caught:
        LLM(folder, drafter=folder / "drafter", device="cpu")
    assert "\n" not in str(caught.value)


def test_a_drafter_of_another_target_is_refused(checkpoint: CheckpointMaker) -> None:
    wide = checkpoint("k2.6", drafter=True, dims=Dims(hidden_size=96)) / "drafter"
    with pytest.raises(DrafterError, match="hidden size is 96, but the target's is 64"):
        LLM(checkpoint("k2.6", drafter=True), drafter=wide, device="cpu")


@pytest.mark.parametrize("positions", [None, 90], ids=["absent", "fewer than the target's"])
def test_a_drafter_with_few_positions(
    positions: int | None, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """Where the drafter's positions end (or are not said), the target's text still goes on."""
    folder = copy(checkpoint("k2.6", drafter=True), tmp_path / "model")
    prompt = list(range(100))
    want = LLM(folder, drafter="none", device="cpu").generate(prompt, GREEDY)[0].token_ids
    edit(folder / "drafter", {"max_position_embeddings": positions})
    llm = LLM(folder, drafter=folder / "drafter", device="cpu")
    assert llm.generate(prompt, GREEDY)[0].token_ids == want
