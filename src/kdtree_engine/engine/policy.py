"""How large a tree a step verifies: a number of nodes, best-first or as one chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from kdtree_engine.config import MAX_ROWS_PER_REQUEST
from kdtree_engine.errors import OptionError, shown

_MOST_DIGITS = 4  # int() of thousands of digits raises an error of its own


@dataclass(frozen=True)
class TreePolicy:
    """`nodes` besides the root; a chain follows the likeliest token of each depth."""

    nodes: int
    chain: bool = False

    def most_rows(self, horizon: int) -> int:
        """Rows of the largest tree, root included, over `horizon` drafted depths."""
        return 1 + (min(self.nodes, horizon) if self.chain else self.nodes)

    def size(self, widths: Sequence[int]) -> int:
        """Nodes of the tree over `widths[d]` candidates at each depth d that it may reach."""
        total, level = 0, 1
        for width in widths:
            level *= min(width, 1) if self.chain else width
            total += level
            if level == 0 or total >= self.nodes:
                break
        return min(total, self.nodes)


def parse_tree_nodes(value: int | str) -> TreePolicy:
    """An int 0..63, or "chain:N" with N in 0..63. Raises OptionError."""
    most = MAX_ROWS_PER_REQUEST - 1
    if isinstance(value, Integral) and not isinstance(value, bool) and 0 <= value <= most:
        return TreePolicy(int(value))
    text = value if isinstance(value, str) else ""
    number = text.removeprefix("chain:")
    if (
        not number.isascii()
        or not number.isdigit()
        or len(number) > _MOST_DIGITS
        or int(number) > most
    ):
        raise OptionError(
            f"tree_nodes {shown(value)} must be a number of nodes from 0 to {most}, or chain:N"
        )
    return TreePolicy(int(number), chain=text != number)
