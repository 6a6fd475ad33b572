"""Attention as it was at 821aeed, for one comparison of bits and times; not part of the engine."""
