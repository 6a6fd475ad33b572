"""`kdtree make-checkpoint`: a small random model in a published format, for tests and tools."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from kdtree_engine.config import MAX_SEED
from kdtree_engine.errors import OptionError


def make_checkpoint(
    out: str,
    /,
    *,
    family: Annotated[
        str, Parameter(help="k2.6, k2-thinking, k2 or deepseek-v3.", metavar="NAME")
    ] = "k2.6",
    format: Annotated[
        str | None,
        Parameter(
            help="bf16, int4 (routed experts) or fp8 (projections); the family's own without it.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    drafter: Annotated[
        bool,
        Parameter(help="Also a DFlash drafter, in OUT/drafter.", negative=(), show_default=False),
    ] = False,
    layout: Annotated[
        str, Parameter(help="The drafter's: z-lab or speculators.", metavar="NAME")
    ] = "z-lab",
    seed: Annotated[
        int,
        Parameter(
            help="The same seed gives the same bytes.", metavar="S", allow_leading_hyphen=True
        ),
    ] = 0,
) -> None:
    """Write a small random checkpoint.

    Parameters
    ----------
    out
        The folder to make; one that holds a model is refused.
    """
    if not 0 <= seed <= MAX_SEED:
        raise OptionError(f"--seed is {seed}: expected 0 to 2^63 - 1")
    if not out:
        raise OptionError("the folder to make has an empty name")
    if layout != "z-lab" and not drafter:
        raise OptionError(f"--layout is {layout!r}, but no drafter is written without --drafter")
    from kdtree_engine.checkpoints import write

    write.make_checkpoint(out, family, seed, drafter, form=format, layout=layout)
    made = f"a random {family} checkpoint" + (" and its drafter" if drafter else "")
    print(f"kdtree: wrote {made} to {out}", file=sys.stderr)
