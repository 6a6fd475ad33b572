"""Tokens of the packed corpus, and batches of them on the training device."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import corpus
import numpy as np
import torch
import vocabulary

EOS = vocabulary.RANKS + 1


def encode_part(job: tuple[Path, Path]) -> tuple[np.ndarray, int]:
    """The tokens of one packed file, each document ended by [EOS], and its size in bytes.

    Only the dialogues may produce special tokens: source that mentions one means its text.
    """
    path, model = job
    coder = vocabulary.encoding(model)
    chat = path.name.startswith("dialogues")
    parts: list[list[int]] = []
    size = 0
    for text in corpus.texts(path):
        ids = coder.encode(text, allowed_special="all") if chat else coder.encode_ordinary(text)
        parts.append([*ids, EOS])
        size += len(text.encode())
    return np.concatenate([np.array(p, dtype=np.uint16) for p in parts]), size


def load(folder: Path, model: Path, workers: int, cache: Path | None) -> dict[str, np.ndarray]:
    """Training, held-out and validation tokens; `sizes` holds the bytes in the same order."""
    if cache and cache.is_file():
        with np.load(cache) as stored:
            return dict(stored)
    parts = [*corpus.train_parts(folder), folder / "dialogues.jsonl.xz"]
    others = [folder / "heldout.jsonl.xz", folder / "validation.jsonl.xz"]
    with get_context("spawn").Pool(workers) as pool:
        done = pool.map(encode_part, [(p, model) for p in [*parts, *others]], chunksize=1)
    arrays = {
        "train": np.concatenate([tokens for tokens, _ in done[: len(parts)]]),
        "heldout": done[-2][0],
        "validation": done[-1][0],
        "sizes": np.array([sum(s for _, s in done[: len(parts)]), done[-2][1], done[-1][1]]),
        "dialogue_tokens": np.array(len(done[len(parts) - 1][0])),
    }
    if cache:
        np.savez(cache, **arrays)
    return arrays


class Sampler:
    """Endless random batches of [batch, length + 1] tokens from one long array.

    Most sequences start anywhere, a share of them at the first token of a document: at use, a
    prompt starts at position 0, and the model must know beginnings there.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch: int, device: str, seed: int) -> None:
        self.length, self.batch, self.device = length, batch, device
        self.data = torch.from_numpy(tokens.astype(np.int32)).to(device)
        starts = np.flatnonzero(tokens == EOS) + 1
        starts = np.concatenate([[0], starts])
        self.starts = torch.from_numpy(starts[starts < len(tokens) - length - 1]).to(device)
        self.random = torch.Generator(device=device).manual_seed(seed)
        self.offsets = torch.arange(length + 1, device=device)
        self.order = torch.empty(0, dtype=torch.long, device=device)

    def _aligned(self, count: int) -> torch.Tensor:
        """Starts at random documents."""
        options = {"device": self.device, "generator": self.random}
        return self.starts[torch.randint(len(self.starts), (count,), **options)]

    def next(self) -> torch.Tensor:
        """The next batch: every place of the corpus comes once before any comes again."""
        documents = max(1, self.batch // 4)
        need = self.batch - documents
        if len(self.order) < need:
            limit = len(self.data) - self.length - 1
            options = {"device": self.device, "generator": self.random}
            shift = torch.randint(self.length, (1,), **options)
            chunks = torch.randperm(limit // self.length, **options) * self.length + shift
            self.order = chunks.clamp(max=limit)
        first, self.order = self.order[:need], self.order[need:]
        begin = torch.cat([first, self._aligned(documents)])
        return self.data[begin.unsqueeze(1) + self.offsets].long()


def windows(tokens: np.ndarray, length: int, batch: int, device: str) -> Iterator[torch.Tensor]:
    """An evaluation text as whole batches of consecutive windows; the last window is cut off."""
    count = (len(tokens) - 1) // length
    rows = [tokens[i * length : (i + 1) * length + 1] for i in range(count)]
    for start in range(0, count, batch):
        piece = rows[start : start + batch]
        piece = piece + [piece[-1]] * (batch - len(piece))
        yield torch.from_numpy(np.stack(piece).astype(np.int64)).to(device)
