"""Train the packaged model's vocabulary: 2,816 byte-pair ranks and 256 special slots.

The split pattern and the order of the special slots are the Kimi line's, so that one tokenizer
implementation reads this vocabulary and the real one; only the ranks are our own. 2,816 + 256 =
3,072 keeps embedding and head at a fifth of the model.

    python recipes/demo/vocabulary.py --corpus .corpus --out src/kdtree_engine/demo/target
"""

from __future__ import annotations

import argparse
import base64
import json
import random
from pathlib import Path

import corpus
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel

RANKS = 2816
SLOTS = 256
LETTER = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTER}]*[\p{{Ll}}{LETTER}]+{CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTER}]+[\p{{Ll}}{LETTER}]*{CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Slot -> name, in the published table's order; the flag says whether decoding may skip the token.
NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>",
    17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}
KEPT = {11, 12, 13, 14, 15, 22, 23}
ADDITIONAL = (2, 3, 4, 6, 7, 9, 10, 17, 18, 19, 20, 21)


def special_tokens() -> dict[str, int]:
    """Name and id of all 256 slots; one without a name is reserved under its id."""
    return {NAMED.get(s, f"<|reserved_token_{RANKS + s}|>"): RANKS + s for s in range(SLOTS)}


def encoding(model: Path) -> tiktoken.Encoding:
    """The vocabulary in a tiktoken.model file, as tiktoken itself runs it."""
    lines = model.read_bytes().splitlines()
    ranks = {base64.b64decode(t): int(r) for t, r in (line.split() for line in lines)}
    return tiktoken.Encoding(
        "kdtree-demo", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens()
    )


def train(texts: list[str]) -> list[bytes]:
    """Byte-pair ranks of the texts: the 256 bytes, then merges in the order they were made."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"),
         ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=RANKS, initial_alphabet=ByteLevel.alphabet(), show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    to_byte = {char: byte for byte, char in enumerate(byte_characters())}
    names = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(to_byte[c] for c in name) for name, _ in names]
    singles = [bytes([b]) for b in range(256)]
    return singles + [t for t in tokens if len(t) > 1]


def byte_characters() -> list[str]:
    """The printable stand-in for each byte that byte-level BPE stores in its vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


def config() -> dict[str, object]:
    """tokenizer_config.json in the published shape."""
    decoder = {
        str(RANKS + slot): {
            "content": name, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": slot not in KEPT,
        }
        for slot, name in NAMED.items()
    }
    return {
        "added_tokens_decoder": decoder,
        "additional_special_tokens": [NAMED[slot] for slot in ADDITIONAL],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 2048,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }


def check(model: Path, texts: list[str]) -> float:
    """Round trip, reachability of every rank, and the bytes a token stands for."""
    coder = encoding(model)
    if coder.n_vocab != RANKS + SLOTS:
        raise SystemExit(f"{model}: {coder.n_vocab} ids, expected {RANKS + SLOTS}")
    for rank in range(RANKS):
        token = coder.decode_single_token_bytes(rank)
        if coder._core_bpe.encode_single_piece(token) != [rank]:  # the byte-level call is private
            raise SystemExit(f"{model}: rank {rank} ({token!r}) cannot be produced by its merges")
    size = count = 0
    for text in [*texts, "naïve 你好 日本 \U0001f600 e\u0301", "a\t\n\r\n  b\n\n"]:
        ids = coder.encode_ordinary(text)
        if coder.decode(ids) != text:
            raise SystemExit(f"{model}: a text did not survive encoding and decoding")
        size += len(text.encode())
        count += len(ids)
    return size / count


def main() -> None:
    """Train on a sample of the corpus, write both files, verify."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=40.0, help="size of the sample")
    args = parser.parse_args()
    texts = [text for part in corpus.train_parts(args.corpus) for text in corpus.texts(part)]
    random.Random(0).shuffle(texts)
    sample, size = [], 0.0
    while texts and size < args.megabytes * 1e6:
        sample.append(texts.pop())
        size += len(sample[-1])
    ranks = train(sample)
    if len(ranks) != RANKS:
        raise SystemExit(f"the trainer made {len(ranks)} ranks, expected {RANKS}")
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "tiktoken.model"
    model.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks)))
    (args.out / "tokenizer_config.json").write_text(json.dumps(config(), indent=2) + "\n")
    heldout = list(corpus.texts(args.corpus / "heldout.jsonl.xz"))
    print(f"{len(ranks)} ranks; {check(model, heldout):.3f} bytes a token on held-out source")


if __name__ == "__main__":
    main()
