"""Training text: files to one long row of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    TokenizerError, which name the file, and the line of a .jsonl.
    """
    parts: list[Ids] = []
    with progress("reading training data", len(files)) as meter:
        for path in files:
            for where, document in _documents(path, tokenizer):
                _check_range(where, document, vocab_size)
                parts.append(np.array(document, dtype=np.int32))
                if end is not None and path.suffix != ".npy":
                    parts.append(np.array([end], dtype=np.int32))
            meter.advance()
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _documents(
    path: Path, tokenizer: Tokenizer | None
) -> Iterator[tuple[str, list[int] | NDArray[Any]]]:
    """Documents with where they stand, as whole numbers of any size."""
    try:
        if path.suffix == ".npy":
            yield str(path), _array(path)
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    where = f"{path}, line {number}"
                    yield where, _line(where, line, tokenizer)
        else:
            yield str(path), _encode(str(path), path.read_text(encoding="utf-8"), tokenizer)
    except (OSError, EOFError, ValueError) as error:
        raise OptionError(f"{path}: cannot be read as training data ({error})") from error


def _array(path: Path) -> NDArray[Any]:
    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise OptionError(f"{path}: holds several arrays; expected one, of token ids")
    if array.dtype.kind not in "iu":
        raise OptionError(f"{path}: holds {array.dtype} values; token ids are integers")
    return array.ravel()


def _line(where: str, line: str, tokenizer: Tokenizer | None) -> list[int]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where}: is not valid JSON ({error})") from error
    if isinstance(data, dict) and isinstance(data.get("token_ids"), list):
        ids: list[int] = data["token_ids"]
        for one in ids:
            if type(one) is not int:  # true and false are ints too
                raise OptionError(f'{where}: "token_ids" has {one!r:.60}, expected whole numbers')
        return ids
    if isinstance(data, dict) and isinstance(data.get("text"), str):
        return _encode(where, data["text"], tokenizer)
    raise OptionError(f'{where}: expected an object with "token_ids" (a list) or "text"')


def _encode(where: str, text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise TokenizerError(f"{where}: is text, but the model has no tokenizer; give token ids")
    return tokenizer.encode(text)


def _check_range(where: str, ids: list[int] | NDArray[Any], vocab_size: int) -> None:
    """Before they become int32, in which 2**32 + 5 would be 5."""
    if not len(ids):
        return
    low, high = (min(ids), max(ids)) if isinstance(ids, list) else (ids.min(), ids.max())
    if low < 0 or high >= vocab_size:
        raise OptionError(f"{where}: holds token ids outside the vocabulary (0..{vocab_size - 1})")
