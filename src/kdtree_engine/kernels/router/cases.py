"""Router sizes of the family."""

from __future__ import annotations

from dataclasses import dataclass

from kdtree_engine.kernels.router.reference import RouterSettings


@dataclass(frozen=True)
class Case:
    """One router over `experts` experts."""

    name: str
    experts: int
    settings: RouterSettings


CASES = (
    Case("packaged", 16, RouterSettings(4, 1, 1, True, 2.827)),
    Case("k2.6", 384, RouterSettings(8, 1, 1, True, 2.827)),
    Case("deepseek-v3", 256, RouterSettings(8, 8, 4, True, 2.5)),
    Case("unnormalised", 8, RouterSettings(2, 4, 2, False, 1.0)),
)
