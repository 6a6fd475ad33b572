"""Which row counts of a batched product have the same bits on this machine, found by trying them.

Seen so far (docs/exactness.md): one Xeon agrees from 2 rows on, one EPYC from 4 rows on, and both
lose it where K passes some hundreds, so products are cut into K segments. A rule is looked for
once per shape, dtype and orientation, in milliseconds, and kept for the life of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Signature = tuple[int, int, torch.dtype, bool]  # K, N, dtype, weights stored [N, K] in memory

_ROW_COUNTS = (*range(2, 34), 40, 47, 48, 57, 63, 64, 65, 96, 100, 128, 200, 256, 257, 512, 1000)
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
    key = (len(_rules), count)
    padded = _padded.get(key)
    if padded is None:
        needs = (rule.rows(count) for rule in _rules.values())
        padded = _padded[key] = max(needs, default=max(4, count))
    return padded


@contextmanager
def free_of_contract() -> Iterator[None]:
    """For benches only: products at their natural row count, whatever the bits."""
    global _contract
    _contract = False
    try:
        yield
    finally:
        _contract = True


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
    for batch, places in ((2, (0, 3)), (5, (1, 2))):
        x, w = _operands(signature, batch, max(rows + 3, _REFERENCE_ROWS))
        want = torch.bmm(x[:, :_REFERENCE_ROWS].contiguous(), w)
        for first in places:
            got = torch.bmm(x[:, first : first + rows].contiguous(), w)
            overlap = min(rows, _REFERENCE_ROWS - first)
            if not torch.equal(got[:, :overlap], want[:, first : first + overlap]):
                return False
    return True


def _operands(signature: Signature, batch: int, rows: int) -> tuple[Tensor, Tensor]:
    k, n, dtype, transposed = signature
    generator = torch.Generator().manual_seed(k * 65537 + n)
    x = torch.randn(batch, rows, k, generator=generator).to(dtype)
    shape = (batch, n, k) if transposed else (batch, k, n)
    w = torch.randn(shape, generator=generator).to(dtype)
    return x, w.transpose(1, 2) if transposed else w
