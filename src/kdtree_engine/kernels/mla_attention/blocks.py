"""Blocks of keys: the borders at which sums restart, part of the order that fixes the bits.

A block's borders are absolute positions, and blocks grow with the position: few parts to fold at a
long context, many to share out at a short one.
"""

from __future__ import annotations

Zones = tuple[tuple[int, int, int, int], ...]
"""(first key, first block, keys of a block, blocks) of each zone: what the kernels are given."""

BORDERS: tuple[tuple[int, int], ...] = ((4096, 128), (8192, 256), (32768, 512), (1 << 30, 1024))
"""(end, keys of a block) of each zone, in keys; all are multiples of a tile of 64."""


def zones(borders: tuple[tuple[int, int], ...] = BORDERS) -> Zones:
    """The zones of `borders`; each zone must hold whole blocks."""
    made, block = [], 0
    starts = (0, *(end for end, _ in borders))
    for start, (end, size) in zip(starts, borders, strict=False):
        assert (end - start) % size == 0 and size % 64 == 0, (start, end, size)
        made.append((start, block, size, (end - start) // size))
        block += (end - start) // size
    return tuple(made)


def block_of(key: int, table: Zones) -> int:
    """The block that holds position `key`."""
    return sum(min(max(key - first, 0) // size, most) for first, _, size, most in table)


def first_key(block: int, table: Zones) -> int:
    """The first position of `block`."""
    return sum(min(max(block - before, 0), most) * size for _, before, size, most in table)
