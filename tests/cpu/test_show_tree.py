"""Drawings of draft trees: no node is lost, and the accepted path stands out."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from traces import FORKED, WORDS, tree

from kdtree_engine.cli.show_tree import TreePrinter, draw, visible
from kdtree_engine.types import AcceptedPath


def drawn(trace: Any, color: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80, color_system="standard" if color else None)
    console.print(draw(trace, lambda token: WORDS[token]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_forked_tree() -> None:
    lines = [line.rstrip() for line in drawn(FORKED).splitlines()]
    assert lines == [
        "● def",
        "├── ● ·read  50%",
        "│   ├── ● (  25%",
        "│   │   └── → )",
        "│   └── ○ :  10%",
        "└── ○ x  20%",
    ]


def test_the_accepted_path_has_its_own_colour() -> None:
    lines = drawn(FORKED, color=True).splitlines()
    green = "\x1b[1;32m"
    assert [green in line for line in lines] == [True, True, True, False, False, False]


def test_a_chain_shares_a_line_up_to_where_it_was_rejected() -> None:
    chain = SimpleNamespace(
        tree=tree([-1, 6, 7, 8, 6], [-1, 0, 1, 2, 3], [1.0, 0.9, 0.8, 0.7, 0.6]),
        path=AcceptedPath([0, 1, 2], 9),
        root=0,
    )
    lines = [line.rstrip() for line in drawn(chain).splitlines()]
    assert lines == ["● def x y  80%", "├── → é", "└── ○ z x  60%"]


def test_a_root_alone() -> None:
    alone = SimpleNamespace(tree=tree([-1], [-1], [1.0]), path=AcceptedPath([0], 1), root=0)
    assert [line.rstrip() for line in drawn(alone).splitlines()] == ["● def", "└── → ·read"]


def test_the_deepest_tree_loses_no_node() -> None:
    # A comb: each node of the spine has a second child, so nothing can share a line.
    parents = [-1]
    for depth in range(31):
        spine = max(0, 2 * depth - 1)
        parents += [spine, spine]
    comb = SimpleNamespace(
        tree=tree([-1] + [6] * 62, parents, [1.0] * 63), path=AcceptedPath([0], 1), root=0
    )
    out = io.StringIO()
    TreePrinter(lambda token: WORDS[token], out).show(comb)
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 1: 62 drafted, 0 accepted"
    assert len(lines) == 1 + 1 + 62 + 1  # title, root, nodes, bonus


def test_blanks_are_visible_and_control_characters_are_not_sent() -> None:
    assert visible(" a\n\x1b[2J") == "·a\\n\\x1b[2J"
    assert visible("[bold]") == "[bold]"
