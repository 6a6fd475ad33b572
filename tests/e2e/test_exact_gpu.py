"""tests/e2e/exact_gpu.py in small, on the CPU: all tokens are compared, by bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from e2e import exact_gpu
from e2e.models import Loaded, Models


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Models(tmp_path_factory.mktemp("models")).load("packaged", "bfloat16")


@pytest.fixture
def items(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> list[exact_gpu.Item]:
    monkeypatch.setattr(exact_gpu, "LENGTHS", ((1, 8), (60, 70)))
    monkeypatch.setattr(exact_gpu, "SPEND", (8, 16))
    monkeypatch.setattr(exact_gpu, "LOAD_STEPS", 3)
    monkeypatch.setattr(exact_gpu, "TREES", {"tree 15": (15, False), "chain:7": (7, True)})
    return exact_gpu.items_of(loaded, exact_gpu.held_out(loaded), 1.0, 60)


@torch.inference_mode()
def test_everything_is_compared(loaded: Loaded, items: list[exact_gpu.Item]) -> None:
    found, violations = exact_gpu.compare(loaded, items, 0.2)
    assert violations == []
    assert {item.params.top_p for item in items} == {None, 0.95}
    alone = found["plain, alone"]["truth_tokens"]
    assert 0 < alone < 60
    assert found["plain, together"]["tokens_compared"] == alone
    assert len(found["plain, together"]["results_in_a_step"]) > 1
    for name in ("tree 15", "chain:7"):
        assert found[name]["tokens_compared"] == found[name]["logits_rows_compared"] == 60
        assert found[name]["tokens_per_step"] > 1.2


@torch.inference_mode()
def test_one_bit_and_one_token_are_found(loaded: Loaded, items: list[exact_gpu.Item]) -> None:
    truth = exact_gpu.Truth(60, loaded.target.config.vocab_size, torch.device("cpu"))
    engine = exact_gpu.engine_of(loaded, 8, 0, False)
    exact_gpu.decode(engine, items, exact_gpu.Ledger("plain", truth), torch.inf)
    truth.bits[31, 7] ^= 1
    truth.tokens[40] ^= 1
    ledger = exact_gpu.Ledger("tree", truth)
    exact_gpu.decode(exact_gpu.engine_of(loaded, 8, 7, False), items, ledger, torch.inf)
    assert len(ledger.violations) == 2
    assert "1 of 3072 logits differ" in " ".join(ledger.violations)


def test_the_default_prompts_fit_the_model(tmp_path: Path, loaded: Loaded) -> None:
    text = exact_gpu.held_out(loaded)
    items = exact_gpu.items_of(loaded, text, 0.0, 50_000)
    lengths = [len(item.prompt) for item in items]
    assert min(lengths) == 1 and max(lengths) > 1024
    assert sum(item.params.max_tokens for item in items) == 50_000
    most = max(len(item.prompt) + item.params.max_tokens for item in items)
    assert most <= loaded.target.config.max_positions
