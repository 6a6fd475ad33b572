"""Text to token ids and back, for the Kimi line of vocabularies."""

from .vocabulary import TextStream, Tokenizer

__all__ = ["TextStream", "Tokenizer"]
