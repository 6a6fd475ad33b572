"""A few hundred steps of the soak; `tests/e2e/soak.py` runs tens of thousands."""

from __future__ import annotations

import pytest

from e2e import soak
from kdtree_engine.engine.request import Request


def test_a_short_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine has its turns, and every kind of request comes; memory was measured."""
    monkeypatch.setattr(soak, "COMPARED_EVERY", 5)
    found = soak.soak(600, "cpu", seed=1, length=25, settings=soak.SETTINGS[2:4])
    assert found["wrong"] == [] and found["steps"] == 600
    assert set(found["requests_added"]) == set(soak.kinds())
    assert {"stop", "length", "cancelled"} <= set(found["requests_ended"])
    assert found["preemptions"] > 0 and found["compared_that_were_preempted"] > 0
    assert set(found["compared_with_plain_decoding"]) == set(soak.kinds())
    assert set(found["stopped_by"]) == {"token", "text"}
    assert found["resident_growth_bytes"] is not None


def test_a_soak_sees_a_changed_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding has one place, the first, and stays right."""
    emit = Request.emit

    def wrong(self: Request, tokens: list[int]) -> list[int]:
        return emit(self, [tokens[0] ^ 1, *tokens[1:]] if self.place > 0 else tokens)

    monkeypatch.setattr(Request, "emit", wrong)
    monkeypatch.setattr(soak, "COMPARED_EVERY", 1)
    assert soak.soak(200, "cpu", seed=1, length=25, settings=soak.SETTINGS[1:2])["wrong"]
