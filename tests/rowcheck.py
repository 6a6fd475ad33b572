"""Two questions about an operator: is it near the float64 truth, and are its rows exact?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 320
COUNTS = (1, 2, 3, 5, 17, 64, 300)


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """The largest error is below `tolerance` standard deviations of the float64 `want`."""
    assert want.dtype == torch.float64
    assert got.shape == want.shape
    assert worst(got, want) < tolerance, f"error {worst(got, want):.2e} of a standard deviation"


def assert_far(wrong: Tensor, want: Tensor, tolerance: float) -> None:
    """A planted mistake is seen: `wrong` would fail `assert_near` by a factor of ten."""
    assert wrong.shape == want.shape
    assert worst(wrong, want) > 10 * tolerance, "the tolerance would let this mistake through"


def worst(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().std(correction=0))


def assert_rows_exact(rows_of: Callable[[Tensor], Tensor], total: int = ROWS) -> None:
    """`rows_of(index [n]) -> [n, ...]` gives each row the same bits in whatever company.

    Alone, among 2 to 300, at the front, in the middle and at the end of the call, and shuffled.
    """
    everything = torch.arange(total)
    whole = rows_of(everything)
    assert bool(whole.isfinite().all()) and not bool((whole == 0).all())
    for count in COUNTS:
        for first in sorted({0, 1, 7, (total - count) // 2, total - count}):
            if first + count > total:
                continue
            index = everything[first : first + count]
            assert torch.equal(rows_of(index), whole[index]), f"rows {first}..+{count} differ"
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(1))
    for index in (shuffled, shuffled[:17], shuffled[:3].repeat(5)):
        assert torch.equal(rows_of(index), whole[index]), "shuffled rows differ"
