"""Batched matrix product whose rows do not depend on the other rows of the call.

On the CPU a BLAS picks its kernel by the number of rows, and some of those kernels round
differently. `row_bmm` keeps every product inside the row counts that a probe on this machine found
to agree bit for bit (see `probe`), which is how the CPU keeps the contract of docs/exactness.md.
"""

from __future__ import annotations

from kdtree_engine.kernels.matmul.probe import RowRule, free_of_contract, padded_rows, row_rule
from kdtree_engine.kernels.matmul.reference import ALIGNMENT, SEGMENT, row_bmm

__all__ = [
    "ALIGNMENT",
    "SEGMENT",
    "RowRule",
    "free_of_contract",
    "padded_rows",
    "row_bmm",
    "row_rule",
]
