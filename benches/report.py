"""The rows of benches/decode.py as text, and as the generated part of docs/benchmarks.md: the last
run on a CPU, then the last on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN = "<!-- begin: written by benches/decode.py -->"
END = "<!-- end -->"
HEAD = (
    "setting", "T", "tokens/step", "bytes/step", "distinct 4-grams", "tokens/s", "ms/step",
    "x plain (low-high)",
)  # fmt: skip
Row = dict[str, Any]


def last_run(path: Path, device: str | None = None) -> list[Row]:
    """The rows that share the run of the file's last line, or of the last one of a kind of device;
    none where there is none. Rows that name no device are of a CPU.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if device in (None, row.get("device", "cpu"))]
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def cells(row: Row) -> list[str]:
    """One row of the table; figures that were not taken are dashes."""
    ratio = row.get("speed_over_plain")
    own = "tokens_per_step" in row
    return [
        row["row"],
        f"{row['temperature']:g}",
        f"{row['tokens_per_step']:.2f}" if own else "-",
        f"{row['bytes_per_step']:.1f}" if own else "-",
        f"{row['distinct_4grams']:.2f}" if own else "-",
        f"{row['tokens_per_s']:.0f}" if ratio else "-",
        f"{row['ms_per_step']:.2f}" if ratio else "-",
        f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "-",
    ]


def table(rows: Sequence[Row]) -> str:
    """Markdown, columns aligned, sorted by temperature."""
    ordered = sorted(rows, key=lambda row: row["temperature"])
    lines = [list(HEAD), *(cells(row) for row in ordered)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]

    def render(line: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([render(lines[0]), rule, *map(render, lines[1:])])


def phase_table(rows: Sequence[Row]) -> str:
    """Percent of a step per phase, of the rows whose engine has a stopwatch."""
    timed = [row for row in rows if row.get("phases_ms_per_step")]
    names = list(timed[0]["phases_ms_per_step"]) if timed else []
    lines = [f"| setting | T | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for row in sorted(timed, key=lambda row: row["temperature"]):
        phases = row["phases_ms_per_step"]
        whole = sum(phases.values())
        shares = " | ".join(f"{100 * phases[name] / whole:.1f}" for name in names)
        lines.append(f"| {row['row']} | {row['temperature']:g} | {shares} |")
    return "\n".join(lines)


def hardware(row: Row) -> str:
    """A paragraph on where and with what, and one on how much was measured."""
    facts = row["environment"]
    cuda = row.get("device") == "cuda"
    dirty = " with uncommitted changes" if facts["dirty"] else ""
    versions = f"Python {facts['python']}, torch {facts['torch']}"
    place = f"{facts['gpu']}, Triton {facts['triton']}" if cuda else f"{facts['cpu']}"
    where = (
        f"{facts['date'][:16]}Z, {place}, {facts['cores']} cores, {facts['threads']} threads; "
        f"{versions}, transformers {facts['transformers']}; commit "
        f"{(facts['commit'] or 'unknown')[:10]}{dirty}. {_load(facts)}"
        f"{row['bench_seconds']:.0f} s in all.{_peer(facts)}"
    )
    floor = row["floor_ms_per_step"]
    rate = f"at the {facts['copy_tbs']:.2f} TB/s of a copy " if cuda else ""
    return (
        f"{where}\n\n{row['dtype']}. Acceptance over {row['prompts']} prompts, times over "
        f"{row['timed_prompts']} of them; "
        f"prompts of {row['prompt_tokens']} tokens, {row['new_tokens']} new ones, medians of "
        f"{row['repeats']} repeats. The weights that one row reads are "
        f"{row['weight_bytes'] / 1e6:.1f} MB; reading so much takes "
        f"{floor:.{4 if cuda else 2}f} ms {rate}here, the floor of a step."
    )


def _load(facts: Row) -> str:
    return (
        f"Load average before {facts['load_before']}, after {facts['load_after']} (this bench alone"
        f" makes about {facts['threads']}). "
    )


def _peer(facts: Row) -> str:
    """What was found of transformers' ways to run experts, or why it was left out."""
    peer = facts.get("transformers_experts")
    if peer is None:
        reason = facts.get("transformers_left_out")
        return f" transformers was left out: {reason}." if reason else ""
    found = ", ".join(f"{name} {ms:.1f}" for name, ms in peer["ms_per_token"].items())
    return (
        f" transformers' ways to run experts in a short probe, ms a token: {found}; its default"
        f" is {peer['default']}, its attention {facts['transformers_attention']}."
    )


def section(rows: Sequence[Row]) -> list[str]:
    """What docs/benchmarks.md says of one run."""
    timed = next(row for row in rows if "floor_ms_per_step" in row)
    parts = [hardware(timed), table(rows)]
    if len(timed["phases_ms_per_step"]) > 1:
        parts += ["Percent of a step, by phase:", phase_table(rows)]
    return parts


def write_docs(results: Path, path: Path = DOCS) -> None:
    """Replace what stands between the markers; append both where the page has none."""
    cpu, cuda = last_run(results, "cpu"), last_run(results, "cuda")
    parts = section(cpu) if cpu else []
    parts += ["### On a GPU", *section(cuda)] if cuda else []
    text = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    before, found, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if found else ""
    body = "\n\n".join(parts)
    path.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after or chr(10)}", encoding="utf-8")
