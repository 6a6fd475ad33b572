"""Golden data that is not in the repository: `shared/data` beside the clone, or further up."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def shared_data(name: str, repository: Path = REPOSITORY) -> Path:
    """The nearest `shared/data/NAME`, from the repository's own folder upwards.

    Where there is none, the place beside the clone at which it is missing.
    """
    places = [folder / "shared" / "data" / name for folder in (repository, *repository.parents)]
    return next((place for place in places if place.exists()), places[1])


def needs(path: Path) -> pytest.MarkDecorator:
    """Skips a test, with the reason, where golden data is not at hand."""
    return pytest.mark.skipif(
        not path.exists(), reason=f"no golden data at {path}, nor in shared/data further up"
    )
