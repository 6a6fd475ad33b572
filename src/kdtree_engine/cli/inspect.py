"""`kdtree inspect`: what a model folder holds and what it would take, without loading it."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from kdtree_engine.cli.options import OUTPUT, flag

if TYPE_CHECKING:
    from rich.table import Table

    from kdtree_engine.config import DraftMask, ModelConfig
    from kdtree_engine.engine.describe import DrafterReport, TargetReport

QUANTIZATIONS = {
    "none": "none",
    "int4": "INT4 routed experts, groups of 32",
    "fp8": "FP8 projections, blocks of 128 x 128",
}


def inspect(
    model: str | None = None,
    /,
    *,
    json: Annotated[bool, flag(OUTPUT, "Print one JSON object.")] = False,
) -> None:
    """Say what a target or drafter is, its sizes, and the memory it takes. Reads headers only.

    Parameters
    ----------
    model
        A folder or a downloaded ORG/NAME; the packaged target without it.
    """
    from kdtree_engine.checkpoints import find_folder
    from kdtree_engine.engine.build import packaged_model
    from kdtree_engine.engine.describe import describe

    report = describe(packaged_model() / "target" if model is None else find_folder(model))
    if json:
        print(json_format.dumps(as_json(report)))
    else:
        show(report)


def show(report: TargetReport | DrafterReport) -> None:
    """Print the tables of a report on stdout."""
    from rich.console import Console

    from kdtree_engine.engine.describe import TargetReport

    console = Console(file=sys.stdout, highlight=False)
    tables = target_tables(report) if isinstance(report, TargetReport) else drafter_tables(report)
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)
    for note in report.notes:
        console.print(f"Note: {note}.", markup=False)


def as_json(report: TargetReport | DrafterReport) -> dict[str, Any]:
    """What --json prints: the report's fields; `kind` is "target" or "drafter"."""
    from kdtree_engine.engine.describe import TargetReport

    return {
        "kind": "target" if isinstance(report, TargetReport) else "drafter",
        **asdict(report),
        "folder": str(report.folder),
        "total_bytes": report.total_bytes,
    }


def target_tables(report: TargetReport) -> list[Table]:
    """The tables of a target."""
    return [
        _pairs("Target", _target_rows(report)),
        _parts(report),
        _pairs("A drafter for it must have", _drafter_needs(report)),
        _memory(report),
    ]


def drafter_tables(report: DrafterReport) -> list[Table]:
    """The tables of a drafter."""
    config = report.config
    rows = config.draft_vocab_size
    layers = config.num_target_layers
    own = [
        ("folder", str(report.folder)),
        ("layout", f"DFlash, {'z-lab' if layers is not None else 'speculators'}"),
        ("layers", f"{config.num_layers}"),
        ("block", f"{config.block_size} slots, {config.horizon} drafted positions"),
        ("a row sees", "; ".join(dict.fromkeys(map(_mask, config.masks)))),
        ("own vocabulary", "none" if rows is None else f"{rows:,} tokens"),
        ("heads", f"{config.num_heads}, {config.num_kv_heads} of keys, {config.head_dim} wide"),
        ("MLP width", f"{config.intermediate_size:,}"),
        ("parameters", _count(report.total_parameters)),
        ("bytes", f"{_size(report.total_bytes)} in {report.tensors:,} tensors"),
        ("cache a token, bf16", f"{report.kv_bytes_per_token:,} bytes"),
    ]
    needs = [
        ("hidden size", f"{config.hidden_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("layers", f"{layers or 'not said'} (taps {_list(config.tap_layers)})"),
        ("mask token", f"{config.mask_token_id:,}, a token that the target does not use"),
    ]
    return [_pairs("Drafter", own), _pairs("Its target must have", needs)]


def _mask(mask: DraftMask) -> str:
    """What a row of a block sees in a layer."""
    past = "all context" if mask.window is None else f"the last {mask.window:,} tokens of context"
    block = "the block up to itself" if mask.causal else "the whole block"
    near = "" if mask.sliding is None else f", within {mask.sliding:,} positions"
    return f"{past} and {block}{near}"


def _target_rows(report: TargetReport) -> list[tuple[str, str]]:
    config = report.config
    moe = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    rope = f"theta {config.rope.theta:,.0f}"
    if config.rope.kind == "yarn":
        first = config.rope.original_max_positions
        rope += f", YaRN {config.rope.factor:g} over {first:,} positions"
    return [
        ("folder", str(report.folder)),
        ("family", config.family),
        ("quantization", QUANTIZATIONS[config.quantization]),
        ("parameters", f"{_count(report.total_parameters)}, {_count(report.active_parameters)} "
         "active a token"),
        ("bytes", f"{_size(report.total_bytes)} in {report.tensors:,} tensors"),
        ("layers", f"{config.num_layers}: {config.num_layers - moe} dense, {moe} of experts"),
        ("hidden size", f"{config.hidden_size:,}"),
        ("attention", _attention(config)),
        ("dense MLP", f"{config.intermediate_size:,} wide"),
        ("experts", _experts(config)),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("positions", f"{config.max_positions:,} ({rope})"),
        ("cache a token, bf16", f"{report.kv_bytes_per_token:,} bytes"),
    ]  # fmt: skip


def _attention(config: ModelConfig) -> str:
    query = "no query rank" if config.q_lora_rank is None else f"query rank {config.q_lora_rank:,}"
    return (
        f"{config.num_heads} heads of {config.nope_dim} + {config.rope_dim}, values "
        f"{config.v_dim}; {query}, latent {config.kv_lora_rank} + {config.rope_dim}"
    )


def _experts(config: ModelConfig) -> str:
    groups = f", from {config.top_groups} of {config.num_groups} groups"
    return (
        f"{config.num_experts}, {config.experts_per_token} a token"
        f"{groups if config.num_groups > 1 else ''}, {config.num_shared_experts} shared, "
        f"{config.moe_intermediate_size:,} wide"
    )


def _drafter_needs(report: TargetReport) -> list[tuple[str, str]]:
    config, taps = report.config, report.default_taps
    return [
        ("hidden size", f"{config.hidden_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("target layers", str(config.num_layers)),
        ("mask token", f"0 to {config.vocab_size - 1:,}, one that text does not use"),
        ("taps", f"layers 0 to {config.num_layers - 1}; by default {_list(taps)}"),
    ]


def _parts(report: TargetReport) -> Table:
    table = _table("Bytes in the files", "part", "size", "share")
    for part, count in report.part_bytes.items():
        if part != "skipped":
            table.add_row(part, _size(count), f"{count / report.total_bytes:.1%}")
    for kind, count in report.skipped.items():
        table.add_row(f"skipped: {kind}", _size(count), f"{count / report.total_bytes:.1%}")
    return table


def _memory(report: TargetReport) -> Table:
    from kdtree_engine.engine.describe import GPU_BYTES

    title = "Memory a GPU, bf16, without a drafter; tokens of cache on about"
    heads = (f"{name}\n{_size(size)}" for name, size in GPU_BYTES.items())
    table = _table(title, "GPUs", "weights", *heads)
    for rank in report.ranks:
        if rank.weight_bytes is None:
            table.add_row(str(rank.gpus), "not divisible", *("" for _ in GPU_BYTES))
            continue
        tokens = (rank.cache_tokens[name] for name in GPU_BYTES)
        left = ("too small" if one is None else _tokens(one) for one in tokens)
        table.add_row(str(rank.gpus), _size(rank.weight_bytes), *left)
    return table


def _tokens(number: int) -> str:
    return f"{number:,}" if number < 10**7 else f"{number / 10**6:,.0f} M"


def _pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    from rich.text import Text

    table = _table(title, "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    for name, value in rows:
        table.add_row(name, Text(value))  # as it is: a folder's name may hold markup
    return table


def _table(title: str, *columns: str) -> Table:
    """A table without lines, its first column to the left."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _count(number: int) -> str:
    for unit, word in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:,.1f} {word}"
    return f"{number:,}"


def _size(number: int) -> str:
    """Bytes in decimal units, as files are measured."""
    for unit, word in ((10**9, "GB"), (10**6, "MB")):
        if number >= unit:
            return f"{number / unit:,.1f} {word}"
    return f"{number:,} bytes"
