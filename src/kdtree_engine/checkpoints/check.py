"""Compare the tensors of a folder with what its config promises; report it all in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kdtree_engine.checkpoints.names import TensorSpec
from kdtree_engine.checkpoints.reader import StoredTensor, few
from kdtree_engine.errors import CheckpointError


@dataclass
class Differences:
    """What was found so far. Names are canonical; `conflicts` are whole phrases about modules."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    def compare(self, specs: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]) -> None:
        """Note every tensor of `specs` that is missing, misshapen or wrongly typed."""
        for name, spec in specs.items():
            found = stored.get(name)
            if found is None:
                self.missing.append(name)
                continue
            if found.shape != spec.shape:
                shapes = f"{list(found.shape)}, expected {list(spec.shape)}"
                self.misshapen.append(f"{name} is {shapes}")
            if found.dtype not in spec.dtypes:
                wanted = " or ".join(spec.dtypes)
                self.mistyped.append(f"{name} is {found.dtype}, expected {wanted}")

    def note_extra(self, names: Iterable[str]) -> None:
        """Note tensors that nothing expects."""
        self.extra.extend(names)

    def raise_if_any(self, folder: Path, reason: str = "") -> None:
        """One CheckpointError with the first few of each kind and how many more, if any."""
        kinds = {
            "missing": self.missing,
            "extra": self.extra,
            "misshapen": self.misshapen,
            "wrongly typed": self.mistyped,
            "contradictory": self.conflicts,
        }
        parts = [f"{len(names)} {kind} ({few(names)})" for kind, names in kinds.items() if names]
        if parts:
            why = reason or self._hint()
            raise CheckpointError(
                f"{folder}: the tensors do not match config.json: {'; '.join(parts)}{why}"
            )

    def _hint(self) -> str:
        if any(name.endswith(".weight_scale_inv") for name in self.extra):
            return "; only projections may be FP8: not the router, norms, embedding or head"
        if any(name.endswith(".weight_packed") for name in self.extra):
            return "; only routed experts may be INT4"
        return ""
