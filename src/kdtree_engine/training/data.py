"""Training text: files to one long row of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kdtree_engine.errors import OptionError, TokenizerError
from kdtree_engine.log import progress
from kdtree_engine.tokenizer import Tokenizer

Ids = NDArray[np.int32]


def read_tokens(
    files: Sequence[Path], tokenizer: Tokenizer | None, vocab_size: int, end: int | None
) -> Ids:
    """All documents of the files, one after the other, texts and lines each followed by `end`.

    .npy: token ids, taken as they are. .jsonl: a document a line, {"token_ids": [...]} or
    {"text": "..."}. Anything else: one document of UTF-8 text. Raises OptionError or
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
                if end is not None and path.suffix != ".npy":
                    parts.append(np.array([end], dtype=np.int32))
            meter.advance()
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _documents(path: Path, tokenizer: Tokenizer | None) -> Iterator[Ids]:
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
            if array.dtype.kind not in "iu":
                raise OptionError(f"{path}: holds {array.dtype} values; token ids are integers")
            yield array.astype(np.int32).ravel()
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
