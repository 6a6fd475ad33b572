"""The models that the contract is tested on, loaded once per process and dtype."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from kdtree_engine.checkpoints import open_drafter, open_model
from kdtree_engine.checkpoints.templates import DEEPSEEK_V3, K26, Dims
from kdtree_engine.checkpoints.write import make_checkpoint
from kdtree_engine.drafter.dflash_model import DFlashModel
from kdtree_engine.drafter.load import load_drafter
from kdtree_engine.engine.build import DTYPES, packaged_model
from kdtree_engine.model import Kimi, load_target
from kdtree_engine.tokenizer import Tokenizer

CPU = torch.device("cpu")
MODELS = ("packaged", "flat", "groups")

TINY = Dims(  # where steps count more than what they compute
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=16,
    nope_dim=8,
    rope_dim=8,
    v_dim=8,
    intermediate_size=32,
    moe_intermediate_size=32,
    num_experts=4,
    drafter_layers=1,
    drafter_heads=2,
    drafter_kv_heads=1,
    drafter_intermediate=32,
)

_RANDOM = {  # family, sizes, spread of the logits
    "flat": (K26, Dims(hidden_size=96, moe_intermediate_size=64, v_dim=24), 0.01),
    "groups": (DEEPSEEK_V3, Dims(experts_per_token=3, q_lora_rank=None), 1.0),
}


@dataclass(frozen=True, eq=False)
class Loaded:
    """A target and its DFlash network, both in one dtype."""

    folder: Path
    draft_folder: Path
    target: Kimi
    network: DFlashModel

    @cached_property
    def text(self) -> list[int]:
        """Token ids of real text, where the model has a vocabulary: this project's own source."""
        if not (self.folder / "tiktoken.model").exists():
            return []
        package = Path(__file__).resolve().parents[2] / "src" / "kdtree_engine"
        sources = [path.read_text(encoding="utf-8") for path in sorted(package.glob("*/*.py"))]
        return Tokenizer.from_folder(self.folder).encode("\n\n\n".join(sources))

    def prompt(self, length: int, seed: int) -> list[int]:
        """A prompt of its own for every seed: real text for even ones where there is any."""
        draw = random.Random(f"prompt {seed}")
        if self.text and seed % 2 == 0:
            first = draw.randrange(len(self.text) - length)
            return self.text[first : first + length]
        return [draw.randrange(self.target.config.vocab_size) for _ in range(length)]


class Models:
    """The packaged model, and random ones, which are written under `home` first."""

    def __init__(self, home: Path, device: torch.device = CPU) -> None:
        self.home = home
        self.device = device
        self._loaded: dict[tuple[str, str], Loaded] = {}

    def load(self, model: str, dtype: str) -> Loaded:
        """The model, loaded when first asked for."""
        key = (model, dtype)
        if key not in self._loaded:
            self._loaded[key] = self._load(*self._folders(model), DTYPES[dtype])
        return self._loaded[key]

    def _folders(self, model: str) -> tuple[Path, Path]:
        if model == "packaged":
            return packaged_model() / "target", packaged_model() / "drafter"
        folder = self.home / model
        if not folder.exists():
            family, dims, spread = _RANDOM[model]
            make_checkpoint(folder, family, 7, drafter=True, dims=dims, logit_std=spread)
        return folder, folder / "drafter"

    def _load(self, folder: Path, draft_folder: Path, dtype: torch.dtype) -> Loaded:
        target = load_target(open_model(folder), dtype, self.device)
        positions = target.config.max_positions
        network = load_drafter(open_drafter(draft_folder), dtype, self.device, positions)
        return Loaded(folder, draft_folder, target, network)
