"""Text and dialogues to token ids and back, for the Kimi line of vocabularies and DeepSeek's."""

from kdtree_engine.tokenizer.base import TextStream, Tokenizer
from kdtree_engine.tokenizer.chat import (
    ChatFormat,
    encode_chat,
    render_chat,
    starts_in_reasoning,
)
from kdtree_engine.tokenizer.messages import rewrite_ids
from kdtree_engine.tokenizer.vocabulary import KimiTokenizer

__all__ = [
    "ChatFormat",
    "KimiTokenizer",
    "TextStream",
    "Tokenizer",
    "encode_chat",
    "render_chat",
    "rewrite_ids",
    "starts_in_reasoning",
]
