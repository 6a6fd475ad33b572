"""Compile every kernel that the engine launches for sm_90 and sm_120, on a machine without a GPU.

    TRITON_INTERPRET=0 python tests/compile_all.py [90|120]

Launches are recorded from the target's own forward, at K2.6's shapes (one rank of eight, three
layers) and at the packaged model's, on tensors without memory, from FP8 weights and dense experts,
and from the small operators. One line a kernel; exit code 1 if one does not compile or takes more
shared memory than a block has.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import replace
from typing import Any

import torch
from compile_tree import launches as small_operators
from compiled import Launch, record, registers

import kdtree_engine.kernels
from kdtree_engine.checkpoints import open_model
from kdtree_engine.config import ModelConfig
from kdtree_engine.engine.build import packaged_model
from kdtree_engine.engine.measure import weights
from kdtree_engine.engine.measure.shapes import KIMI_K26, share
from kdtree_engine.engine.measure.weights import RandomCheckpoint
from kdtree_engine.kernels import launch
from kdtree_engine.kernels.dflash_attention import dflash_attention_paged
from kdtree_engine.kernels.experts import cases as expert_cases
from kdtree_engine.kernels.linear import cases as linear_cases
from kdtree_engine.kernels.mla_attention import TablePlan
from kdtree_engine.model import kimi
from kdtree_engine.types import SpanTable, StepInputs

SHARED_MEMORY = {90: 232_448, 120: launch.SMALLEST_SHARED_MEMORY}
META = torch.device("meta")
BF16 = torch.bfloat16


class WithoutMemory(RandomCheckpoint):
    """Random weights whose tensors have shapes alone, so nothing draws them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, torch.device("cpu"))
        self.device = META

    def random(self, name: str) -> Any:
        """No generator."""


def as_on(capability: int) -> None:
    """Operators take tensors without memory for a device of this kind, wherever they ask."""
    answers = {
        "has_kernel": lambda x: True,
        "launch_options": lambda x: {"PDL": True, "launch_pdl": True},
        "small_memory": lambda device: capability >= 120,
        "is_hopper": lambda device: capability == 90,
    }
    for found in pkgutil.walk_packages(kdtree_engine.kernels.__path__, "kdtree_engine.kernels."):
        if found.name.endswith((".kernel", ".prologue")):
            continue
        module = importlib.import_module(found.name)
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, answer)
    kimi.plan_attention = lambda inputs, null: TablePlan(  # type: ignore[attr-defined]
        inputs.spans, inputs.slots, len(inputs.tokens)
    )


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device=META)


def forwards(config: ModelConfig, rows: tuple[int, ...], pages: int) -> None:
    """Trees of so many rows, and a piece of prompt."""
    target = weights._RandomBuilder(WithoutMemory(config), BF16, META, True).build()
    latents = [empty(pages, 64, config.latent_dim, dtype=BF16) for _ in range(config.num_layers)]
    for count in rows:
        tree = None if count > 64 else empty(1, count)
        table = SpanTable(empty(1, dtype=torch.int32), empty(1, pages, dtype=torch.int32), tree)
        inputs = StepInputs(empty(count), empty(count), empty(count), table, empty(count))
        target.forward(inputs, latents, (0, 0))


def drafts() -> None:
    """The drafter's attention, K2.6's shape and the packaged one's."""
    for heads, kv_heads, width in ((64, 8, 128), (4, 2, 64)):
        query = empty(1, 8, heads, width, dtype=BF16)
        own = empty(1, 8, kv_heads, width, dtype=BF16)
        layer = empty(9, 64, 2, kv_heads, width, dtype=BF16)
        pages = empty(1, 4096, dtype=torch.int32)
        context = empty(1, dtype=torch.int32)
        for limits in ((None, None, False), (4096, 2048, True), (None, 2048, False)):
            dflash_attention_paged(query, own, own, layer, context, pages, *limits)


def launches() -> list[Launch]:
    """Everything, once."""

    def everything() -> None:
        forwards(share(replace(KIMI_K26, num_layers=3), 8), (1, 8, 64, 512), 4096)
        packaged = open_model(packaged_model() / "target").config
        # random experts are made of whole blocks of 128 inputs
        forwards(replace(packaged, num_layers=2, moe_intermediate_size=128), (16,), 32)
        linear_cases.launch_everything(META)
        expert_cases.launch_everything(META)
        drafts()
        small_operators("meta")

    return record(everything)


@torch.inference_mode()
def main(capabilities: list[int]) -> int:
    """Exit code."""
    wrong = 0
    for capability in capabilities:
        as_on(capability)
        for one in launches():
            try:
                compiled = one.compile(capability)
            except Exception as error:  # noqa: BLE001 - every kernel is reported
                wrong += 1
                print(f"sm_{capability} {one.name}: {' '.join(str(error).split())[:300]}")
                continue
            shared = compiled.metadata.shared
            fits = shared <= SHARED_MEMORY[capability]
            wrong += not fits
            print(
                f"sm_{capability} {one.name}: {shared} bytes of shared memory"
                f"{'' if fits else ', TOO MUCH'}, {registers(compiled)}"
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main([int(given) for given in sys.argv[1:]] or list(SHARED_MEMORY)))
