"""The DFlash drafter inside the engine against the float64 golden model, and refused drafters."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_tools import CheckpointMaker, copy, edit, golden_inputs, read_json, stored_tensors
from torch import Tensor

from golden import dflash as golden_draft
from golden import model as golden
from kdtree_engine import LLM, SamplingParams
from kdtree_engine.checkpoints import open_drafter
from kdtree_engine.checkpoints.templates import Dims
from kdtree_engine.checkpoints.write import write_model
from kdtree_engine.drafter.base import DraftStates
from kdtree_engine.drafter.load import drafter_tensors, load_drafter
from kdtree_engine.errors import CheckpointError, ConfigError, DrafterError, KDTreeError
from kdtree_engine.types import DraftBlock, DraftBlocks

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
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
    folder = copy(checkpoint("k2.6", drafter=True, dims=dims), tmp_path / "model")
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


def golden_taps(folder: Path, text: list[int], shift: int = 0) -> np.ndarray:
    """[T, n * H]: outputs of the tapped layers, `shift` layers off."""
    layers = read_json(folder / "drafter")["dflash_config"]["target_layer_ids"]
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
    config, weights = golden_inputs(folder / "drafter")
    inner = config["dflash_config"]
    _, target = golden_inputs(folder)
    first = max(0, context - inner.get("draft_window", context))
    slots = [root if first_slot is None else first_slot]
    slots += [inner["mask_token_id"]] * (config["block_size"] - 1)
    hidden = golden_draft.draft(
        config,
        weights,
        taps[first:context],
        np.arange(first, context),
        target["model.embed_tokens.weight"][slots],
        context,
        window_of_each_slot=True,
        **options,
    )
    logits = golden_draft.draft_logits(config, hidden, target["lm_head.weight"])
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


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


def test_round_trip_of_the_weights(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    """drafter_tensors undoes load_drafter, and what it wrote loads again."""
    home = checkpoint("k2.6", drafter=True, dims=Dims(drafter_kv_heads=1)) / "drafter"
    cpu = torch.device("cpu")
    stored = stored_tensors(home)
    out = drafter_tensors(load_drafter(open_drafter(home), torch.float32, cpu))
    assert out.keys() == stored.keys()
    assert all(torch.equal(out[name], stored[name].float()) for name in stored)
    halves = {name: tensor.bfloat16() for name, tensor in out.items()}
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
