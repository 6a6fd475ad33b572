"""Training text: files to one long row of tokens, and random windows of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdtree_engine.errors import OptionError, TokenizerError
from kdtree_engine.log import progress
from kdtree_engine.tokenizer import Tokenizer

Ids = NDArray[np.int32]


def read_tokens(
    files: Sequence[Path], tokenizer: Tokenizer | None, vocab_size: int, end: int | None
) -> Ids:
    """All documents of the files, one after the other, each followed by `end`.

    .npy: token ids, flat or one document a row. .jsonl: a document a line, {"token_ids": [...]}
    or {"text": "..."}. Anything else: one document of UTF-8 text. Raises OptionError or
    TokenizerError, which name the file.
    """
    parts: list[Ids] = []
    with progress("reading training data", len(files)) as meter:
        for path in files:
            for document in _documents(path, tokenizer):
                if document.size and (document.min() < 0 or document.max() >= vocab_size):
                    raise OptionError(
                        f"{path}: holds token ids outside the vocabulary (0..{vocab_size - 1})"
                    )
                parts.append(document)
                if end is not None:
                    parts.append(np.array([end], dtype=np.int32))
            meter.advance()
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _documents(path: Path, tokenizer: Tokenizer | None) -> Iterator[Ids]:
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            if array.dtype.kind not in "iu":
                raise OptionError(f"{path}: holds {array.dtype} values; token ids are integers")
            yield from (row.astype(np.int32) for row in np.atleast_2d(array))
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    yield _line(f"{path}, line {number}", line, tokenizer)
        else:
            yield _encode(str(path), path.read_text(encoding="utf-8"), tokenizer)
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: cannot be read as training data ({error})") from error


def _line(where: str, line: str, tokenizer: Tokenizer | None) -> Ids:
    data = json.loads(line)
    if isinstance(data, dict) and isinstance(data.get("token_ids"), list):
        return np.array(data["token_ids"], dtype=np.int32)
    if isinstance(data, dict) and isinstance(data.get("text"), str):
        return _encode(where, data["text"], tokenizer)
    raise OptionError(f'{where}: expected an object with "token_ids" (a list) or "text"')


def _encode(where: str, text: str, tokenizer: Tokenizer | None) -> Ids:
    if tokenizer is None:
        raise TokenizerError(f"{where}: is text, but the model has no tokenizer; give token ids")
    return np.array(tokenizer.encode(text), dtype=np.int32)


class Windows:
    """Random windows of `length` tokens, [batch, length] int64 on a device.

    The last `held_out` tokens are kept for measuring: `held()` gives windows from there.
    """

    def __init__(
        self, tokens: Ids, length: int, batch: int, device: torch.device, seed: int
    ) -> None:
        self.held_out = min(len(tokens) // 20, 64 * length)
        if len(tokens) - self.held_out < length or self.held_out < length:
            raise OptionError(
                f"the training data has {len(tokens)} tokens; windows of {length} need at least "
                f"{20 * length}"
            )
        self.tokens = torch.from_numpy(tokens).to(device)
        self.length, self.batch = length, batch
        self._offsets = torch.arange(length, device=device)
        self._random = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """The next random batch."""
        most = len(self.tokens) - self.held_out - self.length
        return self._at(torch.randint(most + 1, (self.batch,), generator=self._random))

    def held(self, batches: int) -> Iterator[Tensor]:
        """`batches` batches of the held-out end, the same at every call."""
        random = torch.Generator().manual_seed(0)
        first = len(self.tokens) - self.held_out
        for _ in range(batches):
            start = torch.randint(self.held_out - self.length + 1, (self.batch,), generator=random)
            yield self._at(first + start)

    def _at(self, starts: Tensor) -> Tensor:
        places = starts.to(self.tokens.device).unsqueeze(1) + self._offsets
        return self.tokens[places].long()
