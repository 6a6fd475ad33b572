"""Which row counts of a batched product have the same bits on this machine, found by trying them.

Seen so far (docs/exactness.md): one EPYC agrees from 4 rows on, other machines from 2; some lose it
where K passes some hundreds, so products are cut into K segments. A rule is looked for once per
shape, dtype and orientation, and kept while the number of threads stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Signature = tuple[int, int, torch.dtype, bool]  # K, N, dtype, weights stored [N, K] in memory

MOST_ROWS = 1024
"""Rows of the largest call that is probed; longer products are cut into such calls."""
_SMALL_COUNTS = (*range(2, 34), 40, 47, 48, 57, 63, 64, 65, 66, 67, 68, 96, 100, 128)
_LARGE_COUNTS = (200, 256, 257, 511, 1000, 1023, MOST_ROWS)
_ROW_COUNTS = (*_SMALL_COUNTS, *_LARGE_COUNTS)
_REFERENCE_ROWS = 64


@dataclass(frozen=True)
class RowRule:
    """How many rows a call may have: at least `minimum`, a multiple of `multiple`.

    With `block` set, products are cut into calls of that many rows, the last one filled up.
    """

    minimum: int
    multiple: int = 1
    block: int | None = None

    def rows(self, count: int) -> int:
        """The smallest allowed number of rows that holds `count`."""
        if self.multiple == 1:
            return max(count, self.minimum)
        return -(-max(count, self.minimum) // self.multiple) * self.multiple


_CANDIDATES = tuple(
    RowRule(minimum, multiple)
    for minimum, multiple in ((2, 1), (4, 1), (2, 2), (4, 4), (8, 1), (8, 8), (16, 1), (16, 16))
)
_FIXED = RowRule(16, 16, block=16)
_SINGLE = RowRule(2, 1, block=1)  # every row alone, beside one row of zeros: slow, but always exact
_NATURAL = RowRule(1, 1)

_rules: dict[Signature, RowRule] = {}
_padded: dict[tuple[int, int], int] = {}  # (rules found, rows) -> what they all allow
_threads = torch.get_num_threads()
_contract = True


def row_rule(signature: Signature) -> RowRule:
    """The rule for products of this signature; the first call for a signature measures it."""
    if not _contract:
        return _NATURAL
    rule = _rules.get(signature)
    if rule is None:
        rule = _rules[signature] = _probe(signature)
    return rule


def padded_rows(count: int, device: torch.device) -> int:
    """Rows that a whole step should have, so that the products inside it need no padding.

    The largest need of the rules found so far; before any was found, 4.
    """
    if device.type != "cpu" or not _contract:
        return count
    _forget_other_threads()
    key = (len(_rules), count)
    padded = _padded.get(key)
    if padded is None:
        needs = (rule.rows(count) for rule in _rules.values())
        padded = _padded[key] = max(needs, default=max(4, count))
    return padded


def _forget_other_threads() -> None:
    """Rules hold for the thread count that they were found with."""
    global _threads
    if torch.get_num_threads() != _threads:
        _threads = torch.get_num_threads()
        _rules.clear()
        _padded.clear()


@contextmanager
def free_of_contract() -> Iterator[None]:
    """For benches only: products at their natural row count, whatever the bits."""
    global _contract
    before, _contract = _contract, False
    try:
        yield
    finally:
        _contract = before


def _probe(signature: Signature) -> RowRule:
    """Compare every row count with a call of 64 rows, at four places and two batch sizes."""
    agreeing = {count: _agrees(signature, count) for count in _ROW_COUNTS}
    for rule in _CANDIDATES:
        if all(agreeing.get(rule.rows(count), True) for count in _ROW_COUNTS):
            return rule
    return _FIXED if _places_agree(signature) else _SINGLE


def _places_agree(signature: Signature) -> bool:
    """Whether a row has the same bits at every place of a call of 16 rows."""
    x, w = _operands(signature, 3, 16)
    want = torch.bmm(x, w)
    return all(
        torch.equal(torch.bmm(x.roll(shift, 1), w), want.roll(shift, 1)) for shift in range(1, 16)
    )


def _agrees(signature: Signature, rows: int) -> bool:
    """Whether every row of a call has the bits that it has in calls of 64 rows.

    Small calls are tried at four places, so that a row stands first, last and in the middle.
    """
    trials = ((2, (0, 3)), (5, (1, 2))) if rows <= _SMALL_COUNTS[-1] else ((2, (1,)),)
    for batch, places in trials:
        whole = -(-(rows + max(places)) // _REFERENCE_ROWS) * _REFERENCE_ROWS
        x, w = _operands(signature, batch, whole)
        parts = torch.split(x, _REFERENCE_ROWS, dim=1)
        want = torch.cat([torch.bmm(part.contiguous(), w) for part in parts], 1)
        for first in places:
            got = torch.bmm(x[:, first : first + rows].contiguous(), w)
            if not torch.equal(got, want[:, first : first + rows]):
                return False
    return True


def _operands(signature: Signature, batch: int, rows: int) -> tuple[Tensor, Tensor]:
    k, n, dtype, transposed = signature
    generator = torch.Generator().manual_seed(k * 65537 + n)
    x = torch.randn(batch, rows, k, generator=generator).to(dtype)
    shape = (batch, n, k) if transposed else (batch, k, n)
    w = torch.randn(shape, generator=generator).to(dtype)
    return x, w.transpose(1, 2) if transposed else w
