"""The contract over a covering array of its axes; `make exact` has the full product."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.contract import (
    AXES,
    MAIN_AXES,
    OTHER_AXES,
    Case,
    Contract,
    allowed,
    covering_cases,
    product_cases,
    prompt_violations,
)
from e2e.covering import all_pairs, covering_array, pairs_of
from e2e.models import MODELS, Models
from e2e.mutations import MUTATIONS, Mutate

GROUPS = list(product(MODELS, AXES["dtype"], AXES["sampling"]))


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contract]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the contract holds for a fixed number of threads
    yield Contract(Models(tmp_path_factory.mktemp("models")))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("axes", [AXES, OTHER_AXES], ids=["all axes", "the other axes"])
def test_covering_array_covers_every_pair(axes: dict[str, tuple[object, ...]]) -> None:
    rows = covering_array(axes, allowed)
    assert all(allowed(row) and list(row) == list(axes) for row in rows)
    covered = {pair for row in rows for pair in pairs_of(row, axes)}
    assert covered >= set(all_pairs(axes, allowed))
    sizes = sorted(map(len, axes.values()))
    assert sizes[-1] * sizes[-2] <= len(rows) <= 2 * sizes[-1] * sizes[-2]
    assert rows == covering_array(axes, allowed)


def test_make_exact_runs_the_full_product() -> None:
    """Every point of the main axes, each with a covering array over the others."""
    others = covering_array(OTHER_AXES, allowed)
    points = Counter(tuple(vars(case)[axis] for axis in MAIN_AXES) for case in product_cases())
    assert set(points) == set(product(*MAIN_AXES.values()))
    assert set(points.values()) == {len(others)}


def run_exact(folder: Path, only: str, *options: str, threads: int = 1) -> dict[str, Any]:
    """The summary of `make exact` over a few rows of the covering array."""
    script, summary = Path(__file__).with_name("exact.py"), folder / "summary.json"
    command = [sys.executable, str(script), "short", "--only", only, "--summary", str(summary)]
    count = str(threads)
    # Passive: other tests run on the same cores, and threads that wait busily would starve them.
    variables = {**os.environ, "OMP_NUM_THREADS": count, "OMP_WAIT_POLICY": "PASSIVE"}
    variables |= {"MKL_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count}
    command += [*options, "--threads", count]
    subprocess.run(command, check=True, timeout=300, env=variables)
    found: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    assert found["complete"] and not found["violations"]
    assert found["threads_each"] == threads
    return found


def test_make_exact_works(tmp_path: Path) -> None:
    """A few cases of it, those under pressure included, in two processes."""
    few = "model=groups,nodes=7|chain,options=penalties|none,drafter=random|none|dflash"
    found = run_exact(tmp_path, few)
    assert found["device"] == "cpu" and not found["captured"]
    assert found["cases"] > 0 and found["generated_tokens_compared"] > 10 * found["cases"]
    assert found["preemptions"] > 0 and found["tokens_compared_under_pressure"] > 500


def test_make_exact_draws_words(tmp_path: Path) -> None:
    found = run_exact(tmp_path, "mode=chain", "--shards", "1")
    assert (found["cases"], found["tokens_drawn_for_chi_square"]) == (1, 1200)


def test_contract_holds_with_two_threads(tmp_path: Path) -> None:
    """As a user's process has them: all other tests pin one, where libraries sum otherwise."""
    found = run_exact(tmp_path, "lengths=page|tiles,dtype=float32", "--shards", "1", threads=2)
    assert set(found["tokens_by_axis"]["model"]) == set(MODELS)
    assert found["generated_tokens_compared"] > 200 and found["prompt_logits_rows_compared"] > 1000


@pytest.mark.parametrize(("model", "dtype", "sampling"), GROUPS)
def test_contract_holds(contract: Contract, model: str, dtype: str, sampling: str) -> None:
    """Rows of the covering array that share their plain answers run in one test."""
    cases = [
        case
        for case in covering_cases()
        if (case.model, case.dtype, case.sampling) == (model, dtype, sampling)
    ]
    violations = [str(one) for case in cases for one in contract.check(case).violations]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("pages", ["ordered", "scrambled"])
@pytest.mark.parametrize("model", MODELS)
def test_prompt_logits_are_the_same_in_any_chunks(
    contract: Contract, model: str, pages: str
) -> None:
    dtype = "float32" if pages == "ordered" else "bfloat16"
    lengths = "blocks" if model == "groups" else "block"
    case = Case(model, 0, "none", "greedy", dtype, 1, 512, lengths, "miss", pages)
    report = prompt_violations(contract, case, chunks=(7, 64, 512))
    assert not report.violations, "\n".join(map(str, report.violations))


def test_every_depth_and_sibling_rank_is_accepted(contract: Contract) -> None:
    """At 63 nodes: each of 7 depths together with each of 9 ranks."""
    wanted = set(product(range(1, 8), range(9)))
    accepted: set[tuple[int, int]] = set()
    for seed in range(200):
        sampling = AXES["sampling"][seed % 3]
        lengths = ("short", "page", "tiles")[seed % 3]
        case = Case(
            "groups", 63, "replay", sampling, "float32", 4, 64, lengths, "miss", "scrambled", seed
        )
        report = contract.check(case)
        assert not report.violations, "\n".join(map(str, report.violations))
        accepted.update(report.accepted)
        if accepted >= wanted:
            break
    assert accepted >= wanted, f"never accepted: {sorted(wanted - accepted)}"


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_broken_engine_is_reported(
    contract: Contract, monkeypatch: pytest.MonkeyPatch, mutate: Mutate
) -> None:
    case = MUTATIONS[mutate]
    assert not contract.check(case).violations
    mutate(monkeypatch)
    assert contract.check(case).violations
