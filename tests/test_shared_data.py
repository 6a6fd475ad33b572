"""The golden data is found wherever the clone stands, and its absence is said."""

from __future__ import annotations

from pathlib import Path

from shared_data import needs, shared_data


def plant(folder: Path) -> Path:
    data = folder / "shared" / "data" / "golden"
    data.mkdir(parents=True)
    return data


def test_the_nearest_data_is_taken(tmp_path: Path) -> None:
    clone = tmp_path / "a" / "b" / "clone"
    clone.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b", clone):
        assert shared_data("golden", clone) != folder / "shared" / "data" / "golden"
        found = plant(folder)
        assert shared_data("golden", clone) == found


def test_absent_data_skips_with_the_place_beside_the_clone(tmp_path: Path) -> None:
    absent = shared_data("no-such-golden-data", tmp_path / "clone")
    assert absent == tmp_path / "shared" / "data" / "no-such-golden-data"
    [skipped] = needs(absent).args
    assert skipped and str(absent) in needs(absent).kwargs["reason"]
    [skipped] = needs(plant(tmp_path)).args
    assert not skipped
