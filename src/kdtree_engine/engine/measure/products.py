"""The dense products of a step by name: what a profile's grids belong to, what may be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kdtree_engine.drafter.dflash_model import DFlashModel
from kdtree_engine.engine.measure.decoding import Decoding
from kdtree_engine.engine.step import path_length
from kdtree_engine.kernels.linear import DenseWeight, PackedLinear, choose_tiles
from kdtree_engine.model import Kimi
from kdtree_engine.model.layers import GatedMLP
from kdtree_engine.model.moe import PackedMixture

_KERNEL = "linear_parts"


@dataclass(frozen=True, eq=False)
class Product:
    """One dense product of a step: its weight, and how many rows meet it."""

    name: str
    weight: PackedLinear
    rows: int


def products(step: Decoding) -> list[Product]:
    """All of one step, in order but for the drafter's, which come last; none on references."""
    engine = step.engine
    count = len(step.requests)
    rows = count * step.rows
    found = [(name, weight, rows) for name, weight in _target(engine.target)]
    model = getattr(engine.drafter, "model", None)
    if isinstance(model, DFlashModel):
        seen = count * path_length(engine.drafter, step.rows)
        drafted = count * model.config.block_size if step.rows > 1 else 0
        found += [("draft_fc", model.fc, seen)]
        for layer in model.layers:
            found += [("draft_key_value", layer.key_value, seen)]
        if drafted:
            for layer in model.layers:
                found += [
                    ("draft_query", layer.query, drafted),
                    ("draft_key_value", layer.key_value, drafted),
                    ("draft_output", layer.output, drafted),
                    ("draft_gate_up", layer.mlp.gate_up, drafted),
                    ("draft_down", layer.mlp.down, drafted),
                ]
            found += [("draft_head", engine.target.head, count * model.config.horizon)]
    return [Product(name, w, n) for name, w, n in found if isinstance(w, PackedLinear)]


def _target(target: Kimi) -> list[tuple[str, DenseWeight]]:
    found: list[tuple[str, DenseWeight]] = []
    for layer in target.layers:
        attention, mlp = layer.attention, layer.mlp
        found.append(("qkv_a", attention.query_and_latent))
        if attention.query_up is not None:
            found.append(("q_b", attention.query_up))
        found.append(("o", attention.output))
        if isinstance(mlp, GatedMLP):
            found += [("dense_gate_up", mlp.gate_up), ("dense_down", mlp.down)]
        elif isinstance(mlp, PackedMixture):
            found.append(("gate+shared", mlp.gate))
    return [*found, ("head", target.head)]


def by_operator(split: Mapping[str, float], found: Sequence[Product]) -> dict[str, float]:
    """`split`, ms by kernel and grid, with grids of one kernel joined and dense products apart by
    weight; weights that have one grid share a line.
    """
    names: dict[str, list[str]] = {}
    for one in found:
        tiles = choose_tiles(one.rows, one.weight)
        parts = one.weight.segments if tiles.split else 1
        grid = one.weight.width // tiles.block_n, parts, -(-one.rows // tiles.block_t)
        known = names.setdefault(f"{_KERNEL} {'x'.join(map(str, grid))}", [])
        if one.name not in known:
            known.append(one.name)
    spent: dict[str, float] = {}
    for label, ms in split.items():
        name = ", ".join(names[label]) if label in names else label.split(" ")[0]
        spent[name] = spent.get(name, 0.0) + ms
    return spent
