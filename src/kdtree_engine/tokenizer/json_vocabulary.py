"""Vocabularies in Hugging Face's tokenizer.json, read by the `tokenizers` library (DeepSeek).

Only byte-level vocabularies are taken, where each token is a string of bytes; that is what lets
text be decoded as it arrives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kdtree_engine.errors import TokenizerError, shown
from kdtree_engine.tokenizer.base import JSON_FILE, Tokenizer, split_names
from kdtree_engine.tokenizer.vocabulary import read_object


class JsonTokenizer(Tokenizer):
    """A byte-level vocabulary of a tokenizer.json.

    special_ids holds all added tokens but blank ones (runs of spaces), whether the file calls them
    special or not: DeepSeek's mark of a user's turn is not called so, and no user may write one.
    Ids without a name, between the others or after them, decode to nothing.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        """data: the content of a tokenizer.json. Raises TokenizerError where it is not usable."""
        added = _added_tokens(data)
        _need_byte_level(data)
        blank = [entry for entry in added if not entry["content"].strip()]
        self.special_ids = {e["content"]: e["id"] for e in added if e["content"].strip()}
        self.hidden_ids = frozenset(entry["id"] for entry in added if entry.get("special"))
        # The library always recognises added tokens in text, and numbers them without gaps
        # whatever the file says. So it gets only the blank ones, and their ids are put right.
        self._library = _load({**data, "added_tokens": blank})
        own = self._library.get_vocab(with_added_tokens=False)
        self._renumber = _renumber(blank, self._library, own)
        self._bytes = _token_bytes(own)
        self._bytes.update({entry["id"]: entry["content"].encode() for entry in added})
        self._reserved = frozenset(self.special_ids.values())
        self.vocab_size = max(self._bytes, default=-1) + 1

    @staticmethod
    def from_folder(path: str | Path) -> JsonTokenizer:
        """Read tokenizer.json of a model folder. Raises TokenizerError, which names the file."""
        file = Path(path) / JSON_FILE
        data = read_object(file)
        try:
            return JsonTokenizer(data)
        except TokenizerError as error:
            raise TokenizerError(f"{file}: {error}") from error

    def encode(self, text: str, special: bool = False) -> list[int]:
        """As in the base. Surrogates without a partner become U+FFFD.

        Special tokens do not swallow the blanks around them, whatever the file says.
        """
        if special:
            return self.encode_parts(split_names(text, self.special_ids))
        ids = self._ids(text)
        if self._reserved.isdisjoint(ids):
            return ids
        # Some vocabularies take a whole word that is in their table: cut such names in two.
        broken = text
        for name in self.special_ids:
            broken = broken.replace(name, f"{name[:1]}\0{name[1:]}")
        ids = [token for piece in broken.split("\0") for token in self._ids(piece)]
        if "\0" in text or not self._reserved.isdisjoint(ids):
            raise TokenizerError("the text cannot be encoded without special tokens; remove them")
        return ids

    def token_bytes(self, token: int) -> bytes:
        """As in the base; a token without a name has none, and only ids below 0 are refused."""
        if token < 0:
            raise TokenizerError(f"token id {token} is below 0")
        return self._bytes.get(token, b"")

    def fits(self, vocab_size: int) -> bool:
        """Models have more rows than names: the rest fills the table up to a round number."""
        return self.vocab_size <= vocab_size

    def _ids(self, text: str) -> list[int]:
        try:
            ids = self._library.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self._library.encode(whole, add_special_tokens=False).ids
        return [self._renumber.get(token, token) for token in ids]


def _renumber(
    blank: list[dict[str, Any]], library: tokenizers.Tokenizer, own: Mapping[str, int]
) -> dict[int, int]:
    """The library's ids of added tokens -> the file's, where they differ."""
    ids = set(own.values())
    changed: dict[int, int] = {}
    for entry in blank:
        given = library.token_to_id(entry["content"])
        if given is not None and given != entry["id"]:
            if given in ids:
                raise TokenizerError(f"the added token with id {entry['id']} cannot be placed")
            changed[given] = entry["id"]
    return changed


def _load(data: Mapping[str, Any]) -> tokenizers.Tokenizer:
    # A limit or filling that a training script left in the file is not part of the vocabulary.
    text = json.dumps({**data, "truncation": None, "padding": None})
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        reason = " ".join(str(error).split())
        raise TokenizerError(f"not a usable tokenizer: {reason:.300}") from error


def _added_tokens(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = data.get("added_tokens") or []
    if not isinstance(added, list):
        raise TokenizerError("'added_tokens' is not a list")
    seen: set[int] = set()
    for entry in added:
        name, slot = (
            (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not name or type(slot) is not int or slot < 0:
            raise TokenizerError("an entry of 'added_tokens' lacks 'content' or 'id'")
        if slot in seen:
            raise TokenizerError(f"'added_tokens' has id {slot} twice")
        seen.add(slot)
    return added


def _need_byte_level(data: Mapping[str, Any]) -> None:
    decoder = data.get("decoder")
    kinds = [decoder] if isinstance(decoder, dict) else []
    if kinds and kinds[0].get("type") == "Sequence":
        kinds = [one for one in kinds[0].get("decoders") or [] if isinstance(one, dict)]
    if not any(one.get("type") == "ByteLevel" for one in kinds):
        found = kinds[0].get("type") if kinds else None
        raise TokenizerError(f"its decoder is {shown(found)}; only ByteLevel is supported")


def _token_bytes(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    """The bytes of each token; the file spells a byte as one printable character."""
    alphabet = _byte_alphabet()
    return {
        token: bytes(alphabet[char] for char in text)
        if all(char in alphabet for char in text)
        else text.encode()
        for text, token in vocabulary.items()
    }


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies (from GPT-2's): printable bytes stand for
    themselves, the others in order for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + place): byte for place, byte in enumerate(others)},
    }
