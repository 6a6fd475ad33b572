"""What every vocabulary offers: text to ids, ids to text, whole or as it arrives."""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from kdtree_engine.checkpoints.reader import present
from kdtree_engine.errors import TokenizerError

# A piece of prompt and whether it is a special token's name (True) or ordinary text.
Part = tuple[str, bool]

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
JSON_FILE = "tokenizer.json"


class Tokenizer(ABC):
    """One vocabulary. Immutable and thread-safe.

    vocab_size: one more than the largest id that has a name.
    special_ids: name -> id of the tokens that text spells out but that must not come from a
    user's text. hidden_ids: those that `decode(skip_special=True)` leaves out.
    """

    vocab_size: int
    special_ids: Mapping[str, int]
    hidden_ids: frozenset[int]

    @staticmethod
    def from_folder(path: str | Path) -> Tokenizer:
        """The vocabulary of a model folder: tiktoken.model if it is there, else tokenizer.json.

        Raises TokenizerError, which names the file, where one is missing or damaged.
        """
        # Imported here, since both build on this module.
        from kdtree_engine.tokenizer.json_vocabulary import JsonTokenizer
        from kdtree_engine.tokenizer.vocabulary import KimiTokenizer

        folder = Path(path)
        if present(folder / JSON_FILE) and not present(folder / RANKS_FILE):
            return JsonTokenizer.from_folder(folder)
        return KimiTokenizer.from_folder(folder)

    @staticmethod
    def in_folder(path: str | Path) -> bool:
        """Whether a model folder has a vocabulary that `from_folder` reads."""
        return any(present(Path(path) / name) for name in (RANKS_FILE, JSON_FILE))

    @abstractmethod
    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`. Nothing is added at either end.

        special: whether the name of a special token inside the text becomes that token. Leave it
        off for text that a user wrote: with it, a user can forge turns of a dialogue.
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, a special token's being its name. TokenizerError if no token."""

    @abstractmethod
    def fits(self, vocab_size: int) -> bool:
        """Whether a model with so many rows of embeddings can be of this vocabulary."""

    def encode_parts(self, parts: Iterable[Part]) -> list[int]:
        """Token ids of a prompt whose special tokens are known: no text becomes one.

        Adjacent texts are encoded as one. Raises TokenizerError for a name that is no special
        token of this vocabulary.
        """
        ids: list[int] = []
        for text, special in joined(parts):
            ids += [self._special(text)] if special else self.encode(text)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Special tokens appear by name. skip_special leaves out those in `hidden_ids`: all but the
        ones that the vocabulary's config marks as text for parsers (thinking, tool calls).
        Raises TokenizerError for an id outside the vocabulary.
        """
        hidden = self.hidden_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in hidden)
        return data.decode("utf-8", errors="replace")

    def stream(self, skip: Collection[int] = ()) -> TextStream:
        """A detokeniser for ids that arrive piece by piece, without the ids in `skip`."""
        return TextStream(self, frozenset(skip))

    def _special(self, name: str) -> int:
        if name not in self.special_ids:
            raise TokenizerError(f"the vocabulary has no token {name}, which the chat needs")
        return self.special_ids[name]


class TextStream:
    """Turns ids into text as they arrive, and holds back a character until its bytes are all there.

    The joined results of `push` and `finish` equal `decode` of all ids (less the skipped ones).
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._names = {token: name for name, token in tokenizer.special_ids.items()}

    def special(self, token: int) -> str | None:
        """The name of a special token, None for any other."""
        return self._names.get(token)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete, perhaps empty. TokenizerError as in `token_bytes`."""
        data = b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._skip)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is still held back, as U+FFFD; afterwards the stream is new."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """The same prompt with adjacent texts as one part, empty texts left out."""
    for special, run in groupby(parts, key=lambda part: part[1]):
        texts: Sequence[str] = [text for text, _ in run]
        if special:
            yield from ((text, True) for text in texts)
        elif text := "".join(texts):
            yield text, False


def split_names(text: str, names: Collection[str]) -> list[Part]:
    """Text cut at the names of special tokens; of two that begin at one place, at the longer."""
    if not names:
        return [(text, False)] if text else []
    pieces = _pattern(tuple(names)).split(text)
    return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]


@lru_cache(maxsize=8)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
