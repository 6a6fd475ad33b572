"""Text and dialogues to token ids and back, for the Kimi line of vocabularies."""

from kdtree_engine.tokenizer.chat import encode_chat, render_chat
from kdtree_engine.tokenizer.vocabulary import TextStream, Tokenizer

__all__ = ["TextStream", "Tokenizer", "encode_chat", "render_chat"]
