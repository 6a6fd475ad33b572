"""Dense product of rows with one weight, stored in column blocks.

Column blocks [blocks, K, columns] turn the product into a batched one: on the CPU that is row-exact
from few rows on and about twice as fast as one wide product, which packs its weights anew at every
call (docs/log.md); on the GPU they are the tile-contiguous layout that reaches the memory floor.
"""

from __future__ import annotations

from kdtree_engine.kernels.linear.reference import ColumnBlocks, linear, pack_columns

__all__ = ["ColumnBlocks", "linear", "pack_columns"]
