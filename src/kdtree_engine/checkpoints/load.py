"""Open target folders: every tensor is checked against the config at once, weights are read later.

`open_model` reads config files and safetensors headers only. The vision tower and
the multi-token-prediction layers are skipped and said so in `notes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from kdtree_engine.checkpoints.check import Differences
from kdtree_engine.checkpoints.model_config import read_model_config
from kdtree_engine.checkpoints.names import (
    FORMS,
    PROJECTIONS,
    TensorSpec,
    dense_form,
    expected_tensors,
    expert_module,
    expert_modules,
    expert_shape,
    fp8_form,
    projection_of,
    skipped_kind,
)
from kdtree_engine.checkpoints.quantization import (
    DENSE,
    FP8,
    INT4,
    PACKED,
    SCALE,
    SCALE_INV,
    SHAPE,
    WEIGHT,
    module_form,
)
from kdtree_engine.checkpoints.reader import SafetensorsFolder, StoredTensor, check_folder
from kdtree_engine.config import ModelConfig
from kdtree_engine.errors import CheckpointError
from kdtree_engine.kernels.fp8 import BLOCK, Fp8Tensor
from kdtree_engine.kernels.fp8.words import joined
from kdtree_engine.kernels.int4 import Int4Tensor, dequantise

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def open_model(folder: str | PathLike[str]) -> ModelCheckpoint:
    """Open a target. ConfigError or CheckpointError (one line) for anything wrong with it."""
    path = Path(folder)
    check_folder(path)
    config = read_model_config(path)
    return ModelCheckpoint(path, config, SafetensorsFolder(path))


def canonical_names(folder: Path, files: SafetensorsFolder, prefix: str) -> dict[str, str]:
    """Name without `prefix` -> stored name. CheckpointError if two tensors have the same name."""
    names: dict[str, str] = {}
    for stored in files.tensors:
        name = stored.removeprefix(prefix)
        if name in names:
            raise CheckpointError(f"{folder}: holds both {names[name]} and {stored}")
        names[name] = stored
    return names


class ModelCheckpoint:
    """A checked target folder. Tensors are read anew at each call, into memory of their own (CPU).

    Names are canonical: DeepSeek-V3's, without `language_model.`. `notes` says what was skipped.
    """

    def __init__(self, folder: Path, config: ModelConfig, files: SafetensorsFolder) -> None:
        prefix = config.tensor_prefix
        if not any(name.startswith(prefix) for name in files.tensors):
            prefix = ""  # the text part of K2.5 on its own
        self.folder = folder
        self.config = replace(config, tensor_prefix=prefix)
        self._files = files
        self._stored_names = canonical_names(folder, files, prefix)
        self.notes = self._check()

    def headers(self) -> dict[str, StoredTensor]:
        """Every tensor by canonical name, skipped ones included."""
        return {name: self._files.tensors[full] for name, full in self._stored_names.items()}

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Tensor `name` as stored, or only the given rows and columns of it.

        `lm_head.weight` is the embedding where the config ties them. CheckpointError if unknown.
        """
        if name == HEAD and self.config.tie_word_embeddings:
            name = EMBEDDING
        return self._files.read(self._stored(name), rows, columns)

    def weight(self, module: str) -> Tensor | Fp8Tensor:
        """The weight [out, in] of a linear module that is no routed expert, in its stored form.

        FP8 where a weight_scale_inv stands beside it, in whichever file. CheckpointError if
        unknown.
        """
        values = self.tensor(module + WEIGHT)
        if module + SCALE_INV not in self._stored_names:
            return values
        return Fp8Tensor(values, self.tensor(module + SCALE_INV))

    def experts(self, layer: int) -> ExpertTensors:
        """Routed experts of the 0-based MoE layer `layer`, one by one."""
        assert 0 <= layer < self.config.num_layers and self.config.is_moe_layer(layer), layer
        return ExpertTensors(self, layer)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self._files.close()

    def _stored(self, name: str) -> str:
        if name not in self._stored_names:
            raise CheckpointError(f"{self.folder}: holds no tensor {name}")
        return self._stored_names[name]

    def _check(self) -> tuple[str, ...]:
        """Raise for every difference between config and headers; return the notes."""
        config = self.config
        stored = self.headers()
        for key, count in (("layers", config.num_layers), ("experts", config.num_experts)):
            if count > len(stored):  # also keeps an absurd config from filling the memory
                raise CheckpointError(
                    f"{self.folder}: config.json promises {count} {key}, "
                    f"but the folder holds {len(stored)} tensors"
                )
        found = Differences()
        used = self._dense_or_fp8(stored, found)
        found.compare(used, stored)
        known = set(used)
        for module, shape in expert_modules(config):
            known.update(self._check_expert(module, shape, stored, found))
        kinds = {name: skipped_kind(name, config) for name in stored.keys() - known}
        found.note_extra(sorted(name for name, kind in kinds.items() if kind is None))
        found.raise_if_any(self.folder)
        return self._notes(Counter(kind for kind in kinds.values() if kind is not None))

    def _dense_or_fp8(
        self, stored: dict[str, StoredTensor], found: Differences
    ) -> dict[str, TensorSpec]:
        """The tensors besides routed experts, projections in the form that their names tell."""
        specs = {}
        for name, spec in expected_tensors(self.config, experts=False).items():
            module = projection_of(name)
            if module is None or not _in_fp8(module, stored):
                specs[name] = spec
                continue
            rows, columns = spec.shape
            specs.update(fp8_form(module, (rows, columns)))
            self._check_declared(module, FP8, found)
        return specs

    def _check_expert(
        self,
        module: str,
        shape: tuple[int, int],
        stored: dict[str, StoredTensor],
        found: Differences,
    ) -> set[str]:
        """Check one projection of a routed expert; return the names that belong to it."""
        forms = {DENSE: dense_form, **FORMS}
        try:
            form = module_form(module, stored)
        except CheckpointError as error:
            found.conflicts.append(str(error))
            return {name for specs in forms.values() for name in specs(module, shape)}
        if form == DENSE and _in_fp8(module, stored):
            form = FP8  # the scales are missing
        specs = forms[form](module, shape)
        if self._check_declared(module, form, found):
            found.compare(specs, stored)
        return set(specs)

    def _check_declared(self, module: str, form: str, found: Differences) -> bool:
        """Whether the config announces `form`, as it must where it is not dense; else noted."""
        declared = self.config.quantization
        if form in (DENSE, declared):
            return True
        says = "no quantization" if declared == "none" else f"{declared.upper()} alone"
        found.conflicts.append(f"{module} is {form.upper()}, but config.json declares {says}")
        return False

    def _notes(self, skipped: Counter[str]) -> tuple[str, ...]:
        first, count = self.config.num_layers, self.config.num_mtp_layers
        layers = f"layer {first}" if count == 1 else f"layers {first} to {first + count - 1}"
        texts = {
            "mtp": f"skipped the multi-token-prediction {layers} ({skipped['mtp']} tensors)",
            "vision": f"skipped {skipped['vision']} vision tensors",
            "buffer": f"skipped {skipped['buffer']} stored rotary tables",
            "tied": "used the embedding as lm_head, as config.json says, not the stored lm_head",
        }
        notes = [text for kind, text in texts.items() if skipped[kind]]
        if self._files.unindexed:
            notes.append(f"skipped {self._files.unindexed} tensors that the index does not name")
        return tuple(notes)


def _in_fp8(module: str, stored: dict[str, StoredTensor]) -> bool:
    """Whether a module's tensors are meant as FP8: one of its two is enough."""
    weight = stored.get(module + WEIGHT)
    return module + SCALE_INV in stored or (weight is not None and weight.dtype == "F8_E4M3")


class ExpertTensors:
    """The routed experts of one layer. Each call reads one expert; nothing is kept.

    I is moe_intermediate_size, H hidden_size. Values of dense experts are in the stored dtype, of
    INT4 ones bf16(q x scale), of FP8 ones q x scale in the dtype asked for.
    """

    def __init__(self, checkpoint: ModelCheckpoint, layer: int) -> None:
        self.layer = layer
        self.count = checkpoint.config.num_experts
        self._checkpoint = checkpoint
        self._files = checkpoint._files

    def form(self, expert: int, projection: str) -> str:
        """How a projection (`gate_proj`, `up_proj`, `down_proj`) is stored: "dense", "int4" or
        "fp8".
        """
        return module_form(self._module(expert, projection), self._checkpoint._stored_names)

    def stored(
        self, expert: int, projection: str, own: bool = True
    ) -> Tensor | Int4Tensor | Fp8Tensor:
        """One projection [out, in] in its stored form: [I, H] for gate and up, [H, I] for down.

        INT4 may be a view of the file unless `own`: for use at once, never to be kept.
        """
        if self.form(expert, projection) == INT4:
            return self._int4(expert, projection, own)
        return self._checkpoint.weight(self._module(expert, projection))

    def weight(self, expert: int, projection: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """One projection [out, in] as values; `dtype` is what FP8 becomes."""
        weight = self.stored(expert, projection, own=False)
        if isinstance(weight, Int4Tensor):
            return dequantise(weight)
        return weight.dequantize(dtype) if isinstance(weight, Fp8Tensor) else weight

    def gate_up(self, expert: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Gate over up, [2 I, H]."""
        parts = [self.weight(expert, name, dtype) for name in ("gate_proj", "up_proj")]
        return torch.cat(parts)

    def down(self, expert: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Down, [H, I]."""
        return self.weight(expert, "down_proj", dtype)

    def pairs(
        self, dtype: torch.dtype = torch.bfloat16
    ) -> Iterator[tuple[Int4Tensor | Fp8Tensor | Tensor, Int4Tensor | Fp8Tensor | Tensor]]:
        """Every expert's gate over up and its down, in turn: in the form that all of them have.

        Dense values where forms differ, and where the rows of an FP8 gate do not fill its blocks.
        """
        forms = {
            self.form(expert, projection)
            for expert in range(self.count)
            for projection in PROJECTIONS
        }
        whole = forms == {FP8} and (
            expert_shape(self._checkpoint.config, "gate_proj")[0] % BLOCK == 0
        )
        for expert in range(self.count):
            if whole:
                own = [self.stored(expert, projection) for projection in PROJECTIONS]
                gate, up, down = (weight for weight in own if isinstance(weight, Fp8Tensor))
                yield joined(gate, up), down
                continue
            if forms != {INT4}:
                yield self.gate_up(expert, dtype), self.down(expert, dtype)
                continue
            words = [self._int4(expert, projection, own=False) for projection in PROJECTIONS]
            both = (torch.cat(pair) for pair in zip(words[0], words[1], strict=True))
            yield Int4Tensor(*both), words[2]

    def _int4(self, expert: int, projection: str, own: bool) -> Int4Tensor:
        """Packed words and scales; views of the file unless `own`."""
        module = self._module(expert, projection)
        names = {part: self._checkpoint._stored(module + part) for part in (PACKED, SCALE, SHAPE)}
        says = self._files.read(names[SHAPE]).tolist()
        shape = list(expert_shape(self._checkpoint.config, projection))
        if says != shape:
            raise CheckpointError(
                f"{self._checkpoint.folder}: {module}.weight_shape says {says}, expected {shape}"
            )
        read = self._files.read if own else self._files.view
        return Int4Tensor(read(names[PACKED]), read(names[SCALE]))

    def _module(self, expert: int, projection: str) -> str:
        assert 0 <= expert < self.count and projection in PROJECTIONS, (expert, projection)
        return expert_module(self.layer, expert, projection)
