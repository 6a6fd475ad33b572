"""Open DFlash drafters in z-lab's and the speculators layout (docs/checkpoints.md)."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from kdtree_engine.checkpoints.check import Differences
from kdtree_engine.checkpoints.drafter_config import read_drafter_config
from kdtree_engine.checkpoints.names import (
    DRAFT_TO_TARGET,
    EMBED_TOKENS,
    LM_HEAD,
    TARGET_TO_DRAFT,
    VERIFIER_PREFIXES,
    drafter_name,
    drafter_tensors,
    drafter_vocabulary,
)
from kdtree_engine.checkpoints.reader import SafetensorsFolder, StoredTensor, check_folder, present
from kdtree_engine.config import DrafterConfig
from kdtree_engine.errors import CheckpointError

MASK_EMBEDDING = "mask_embedding.pt"


def open_drafter(folder: str | PathLike[str]) -> DrafterCheckpoint:
    """Open a DFlash drafter. ConfigError, CheckpointError or DrafterError."""
    path = Path(folder)
    check_folder(path)
    config = read_drafter_config(path)
    if present(path / MASK_EMBEDDING):
        raise CheckpointError(
            f"{path}: holds {MASK_EMBEDDING}, an embedding of the mask token apart from the "
            "embedding; that is not supported, and pickles are not read"
        )
    return DrafterCheckpoint(path, config, SafetensorsFolder(path))


def draft_tokens(offsets: Tensor, members: Tensor | None, vocab: int, where: str) -> Tensor:
    """[D] int64, rising: the token that each draft id stands for, id + offsets[id].

    members [V] bool, where given: whether a token is among them. CheckpointError for tokens outside
    the vocabulary of V, out of order or twice, and where the two disagree.
    """
    start = f"{where}: {DRAFT_TO_TARGET}"
    tokens = torch.arange(len(offsets)) + offsets.long()
    outside = (tokens < 0) | (tokens >= vocab)
    if bool(outside.any()):
        draft = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{start} maps draft id {draft} to token {int(tokens[draft])}, outside of the "
            f"vocabulary of {vocab}; expected offsets: token = draft id + {DRAFT_TO_TARGET}"
        )
    falls = tokens[1:] <= tokens[:-1]
    if bool(falls.any()):
        draft = int(falls.nonzero()[0]) + 1
        raise CheckpointError(
            f"{start} maps draft id {draft} to token {int(tokens[draft])} and the one before it to "
            f"{int(tokens[draft - 1])}; expected rising tokens, token = draft id + "
            f"{DRAFT_TO_TARGET}"
        )
    if members is not None and not torch.equal(members.nonzero()[:, 0], tokens):
        raise CheckpointError(
            f"{start} and {TARGET_TO_DRAFT} name different tokens ({len(tokens)} and "
            f"{int(members.sum())}); the files are not of one drafter"
        )
    return tokens


class DrafterCheckpoint:
    """A checked drafter folder; z-lab's names or TorchSpec's, with or without `model.` in front.

    `has_embedding`, `has_head`: whether it holds its own, which is then used. `tokens` [D] int64,
    rising: the token of each row of its head, None where the rows are the vocabulary. `notes` says
    what was skipped.
    """

    def __init__(self, folder: Path, config: DrafterConfig, files: SafetensorsFolder) -> None:
        self.folder = folder
        self.config = config
        self._files = files
        self._stored_names = self._names()
        self.notes = self._check()
        self.has_embedding = EMBED_TOKENS in self._stored_names
        self.has_head = LM_HEAD in self._stored_names
        self.tokens = self._tokens()

    def headers(self) -> dict[str, StoredTensor]:
        """Every tensor by z-lab's name for it."""
        return {name: self._files.tensors[full] for name, full in self._stored_names.items()}

    def tensor(self, name: str) -> Tensor:
        """Tensor `name` as stored, in memory of its own (CPU). CheckpointError if unknown."""
        stored = self._stored_names.get(drafter_name(name))
        if stored is None:
            raise CheckpointError(f"{self.folder}: holds no tensor {name}")
        return self._files.read(stored)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self._files.close()

    def _names(self) -> dict[str, str]:
        """z-lab's name -> stored name. CheckpointError if two tensors have the same name."""
        names: dict[str, str] = {}
        for stored in self._files.tensors:
            name = drafter_name(stored)
            if name in names:
                raise CheckpointError(f"{self.folder}: holds both {names[name]} and {stored}")
            names[name] = stored
        return names

    def _check(self) -> tuple[str, ...]:
        """Raise for every difference between config and headers; return the notes."""
        config = self.config
        stored = self.headers()
        if config.num_layers > len(stored):
            raise CheckpointError(
                f"{self.folder}: config.json promises {config.num_layers} layers, "
                f"but the folder holds {len(stored)} tensors"
            )
        needed = {LM_HEAD, DRAFT_TO_TARGET} if config.reduced else set()
        specs = drafter_tensors(config)
        for name, spec in drafter_vocabulary(config).items():
            if name in stored or name in needed:
                specs[name] = spec
        skipped = [name for name in stored if name.startswith(VERIFIER_PREFIXES)]
        found = Differences()
        found.compare(specs, stored)
        found.note_extra(sorted(stored.keys() - specs.keys() - set(skipped)))
        found.raise_if_any(self.folder, self._reason(needed & set(found.missing)))
        return (f"skipped the drafter's copies of the target ({', '.join(skipped)})",) * bool(
            skipped
        )

    def _reason(self, missing: set[str]) -> str:
        """Why the vocabulary's tensors are needed, where they are missing."""
        if not missing:
            return ""
        return (
            f"; draft_vocab_size {self.config.draft_vocab_size} is not the vocabulary of "
            f"{self.config.vocab_size}, so the drafter needs a head of its own and "
            f"{DRAFT_TO_TARGET}, what to add to a draft id to get the token's"
        )

    def _tokens(self) -> Tensor | None:
        """The map from draft ids, checked; None where there is none or it changes nothing."""
        if DRAFT_TO_TARGET not in self._stored_names:
            return None
        has_members = TARGET_TO_DRAFT in self._stored_names
        members = self.tensor(TARGET_TO_DRAFT) if has_members else None
        vocab = self.config.vocab_size
        tokens = draft_tokens(self.tensor(DRAFT_TO_TARGET), members, vocab, str(self.folder))
        return tokens if self.config.reduced else None
