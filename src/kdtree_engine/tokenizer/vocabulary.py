"""The Kimi vocabulary: a tiktoken byte-pair table followed by 256 slots of special tokens.

Sources: the split pattern, the slots and the cuts of long inputs are those of the tokenizer that
Moonshot publishes with the K2 line (the facts are in docs/vocabulary.md); tests compare with ids
computed by it.
"""

from __future__ import annotations

import base64
import binascii
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from kdtree_engine.checkpoints.reader import present, read_bytes, read_json
from kdtree_engine.errors import CheckpointError, TokenizerError
from kdtree_engine.tokenizer.base import CONFIG_FILE, RANKS_FILE, Part, Tokenizer, joined

SPECIAL_SLOTS = 256

# A word: an optional leading mark, upper-case-like letters, lower-case-like letters, an English
# contraction. Han is taken out of the letters, since it has an alternative of its own.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# tiktoken's regular expressions are quadratic on long runs, so the reference cuts its input first.
# The cuts change ids: they are part of the vocabulary's definition.
MAX_PIECE = 400_000
MAX_RUN = 25_000
_LONG_RUN = re.compile(rf"\S{{{MAX_RUN + 1},}}|\s{{{MAX_RUN + 1},}}")


class KimiTokenizer(Tokenizer):
    """Any number of ranks, then 256 special slots. Immutable and thread-safe."""

    def __init__(
        self, ranks: Mapping[bytes, int], names: Mapping[int, str], visible: Collection[int] = ()
    ) -> None:
        """ranks: byte string -> id 0..n-1. names: id -> special name, ids in n..n+255.

        visible: special ids that `decode(skip_special=True)` keeps (thinking and tool markers).
        Raises TokenizerError where the ids do not fit together.
        """
        _check_ranks(ranks)
        first = len(ranks)
        self.vocab_size = first + SPECIAL_SLOTS
        self.special_ids = _fill_slots(names, first)
        # Unnamed slots are as invisible as control tokens: no reader of the text expects them.
        self.hidden_ids = frozenset(self.special_ids.values()) - frozenset(visible)
        self._bytes: list[bytes] = [b""] * self.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        for name, slot in self.special_ids.items():
            self._bytes[slot] = name.encode()
        self._encoding = tiktoken.Encoding(
            "kimi",
            pat_str=KIMI_PATTERN,
            mergeable_ranks=dict(ranks),
            special_tokens=self.special_ids,
        )

    @staticmethod
    def from_folder(path: str | Path) -> KimiTokenizer:
        """Read tiktoken.model and tokenizer_config.json of a model folder.

        Raises TokenizerError, which names the file, where one is missing or damaged.
        """
        folder = Path(path)
        ranks = _read_ranks(folder / RANKS_FILE)
        names, visible = _read_names(folder / CONFIG_FILE)
        try:
            return KimiTokenizer(ranks, names, visible)
        except TokenizerError as error:
            raise TokenizerError(f"{folder}: {error}") from error

    def encode(self, text: str, special: bool = False) -> list[int]:
        """As in the base; long texts are cut as the published code cuts them."""
        ids: list[int] = []
        for piece in _split(text, _borders(text)):
            if special:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def encode_parts(self, parts: Iterable[Part]) -> list[int]:
        """As in the base. The cuts fall where they fall in the whole prompt, names included."""
        pieces = list(joined(parts))
        borders = _borders("".join(text for text, _ in pieces))
        ids: list[int] = []
        start = 0
        for text, special in pieces:
            end = start + len(text)
            if special:
                ids.append(self._special(text))
            else:
                inside = borders[bisect_right(borders, start) : bisect_left(borders, end)]
                for piece in _split(text, [border - start for border in inside]):
                    ids += self._encoding.encode_ordinary(piece)
            start = end
        return ids

    def fits(self, vocab_size: int) -> bool:
        """The published models have a row for every slot and none more."""
        return vocab_size == self.vocab_size

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, a special token's being its name. TokenizerError if no token."""
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(
                f"token id {token} is outside the vocabulary (0..{self.vocab_size - 1})"
            )
        return self._bytes[token]


def _borders(text: str) -> list[int]:
    """Where the reference cuts: every MAX_PIECE characters, then inside long runs. Ascending."""
    borders: list[int] = []
    for start in range(0, len(text), MAX_PIECE):
        borders.append(start)
        for run in _LONG_RUN.finditer(text[start : start + MAX_PIECE]):
            # What precedes the run stays with the run's first MAX_RUN characters.
            borders += range(start + run.start() + MAX_RUN, start + run.end(), MAX_RUN)
    return borders[1:]


def _split(text: str, borders: Sequence[int]) -> Iterator[str]:
    for start, end in zip([0, *borders], [*borders, len(text)], strict=True):
        yield text[start:end]


def read_file(path: Path) -> bytes:
    """The bytes of a file of a model folder, which must not be a link that leaves the folder."""
    try:
        return read_bytes(path.parent, path.name, TokenizerError)
    except CheckpointError as error:  # a link that leaves the folder
        raise TokenizerError(str(error)) from error


def read_object(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """The object in a JSON file of a model folder, as `read_file`; {} for none where not needed."""
    if not needed and not present(path):
        return {}
    try:
        return read_json(path.parent, path.name, TokenizerError)
    except CheckpointError as error:  # a link that leaves the folder
        raise TokenizerError(str(error)) from error


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Parse lines of 'base64 rank'. Raises TokenizerError with the line's number."""
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(read_file(path).splitlines(), start=1):
        if not line:
            continue
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(f"{path} line {number}: expected 'base64 rank'") from error
        if not token:
            raise TokenizerError(f"{path} line {number}: an empty token")
        if rank in seen:
            raise TokenizerError(f"{path} line {number}: rank {rank} occurs twice")
        if token in ranks:
            raise TokenizerError(
                f"{path} line {number}: token {token!r} occurs twice (ranks {ranks[token]}, {rank})"
            )
        ranks[token] = rank
        seen.add(rank)
    if not ranks:
        raise TokenizerError(f"{path} holds no tokens")
    return ranks


def _check_ranks(ranks: Mapping[bytes, int]) -> None:
    present = set(ranks.values())
    hole = next((rank for rank in range(len(ranks)) if rank not in present), None)
    if hole is not None:
        raise TokenizerError(
            f"rank {hole} is missing: {len(ranks)} tokens must have the ranks 0..{len(ranks) - 1}"
        )
    # Without one of them some text could not be encoded at all.
    absent = [value for value in range(256) if bytes([value]) not in ranks]
    if absent:
        raise TokenizerError(f"{len(absent)} single bytes have no token, first 0x{absent[0]:02x}")


def _read_names(path: Path) -> tuple[dict[int, str], set[int]]:
    """Names of special ids, and those of them marked special=false, from added_tokens_decoder."""
    table = read_object(path).get("added_tokens_decoder")
    if not isinstance(table, dict):
        raise TokenizerError(f"{path} has no table 'added_tokens_decoder'")
    names: dict[int, str] = {}
    visible: set[int] = set()
    for key, entry in table.items():
        slot, name, special = _read_entry(path, key, entry)
        names[slot] = name
        if not special:
            visible.add(slot)
    return names, visible


def _read_entry(path: Path, key: str, entry: Any) -> tuple[int, str, bool]:
    name = entry.get("content") if isinstance(entry, dict) else None
    # The length comes first: int() refuses thousands of digits with an error of its own.
    if len(key) > 20 or not key.isdecimal() or not isinstance(name, str) or not name:
        raise TokenizerError(
            f"{path}: added_tokens_decoder[{key!r:.60}] is not an id with a 'content'"
        )
    return int(key), name, bool(entry.get("special", True))


def _fill_slots(names: Mapping[int, str], first: int) -> dict[str, int]:
    """Name all 256 slots from `first` on. Raises TokenizerError on a stray id or a double name."""
    last = first + SPECIAL_SLOTS - 1
    for slot, name in names.items():
        if not first <= slot <= last:
            raise TokenizerError(
                f"special token {name!r} has id {slot}, outside the {SPECIAL_SLOTS} slots "
                f"{first}..{last} that follow the {first} ranks"
            )
    filled: dict[str, int] = {}
    for slot in range(first, last + 1):
        name = names.get(slot, f"<|reserved_token_{slot}|>")
        if name in filled:
            raise TokenizerError(f"ids {filled[name]} and {slot} are both named {name!r}")
        filled[name] = slot
    return filled
