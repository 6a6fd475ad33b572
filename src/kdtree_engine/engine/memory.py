"""What a model will take, and what there is: known from the config before a tensor is read."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from kdtree_engine.checkpoints.names import expected_tensors
from kdtree_engine.config import PAGE_SIZE, DrafterConfig, ModelConfig
from kdtree_engine.errors import CapacityError
from kdtree_engine.model.footprint import packed_bytes

_CPU_CACHE_BYTES = 2 << 30
CUDA_CACHE_SHARE = 0.8
"""How much of the memory that is free once the weights are in a GPU gives to the cache."""
_GIB = 1 << 30


def free_bytes(device: torch.device) -> int | None:
    """Memory that could be taken now; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = fields.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None


def parameters(config: ModelConfig) -> tuple[int, int]:
    """Weights of a target: all but its routed experts', and theirs, quantised ones one by one."""
    specs = expected_tensors(config, experts=False).values()
    layers = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    return sum(math.prod(spec.shape) for spec in specs), layers * config.num_experts * expert


def weight_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """What the weights take: laid out for kernels on CUDA, quantised ones expanded elsewhere."""
    if device.type == "cuda":
        return packed_bytes(config, dtype)
    return sum(parameters(config)) * dtype.itemsize


def page_bytes(config: ModelConfig, drafter: DrafterConfig | None, dtype: torch.dtype) -> int:
    """One cache page in all layers, the drafter's context included."""
    elements = config.num_layers * config.latent_dim
    if drafter is not None:
        elements += drafter.num_layers * 2 * drafter.num_kv_heads * drafter.head_dim
    return elements * dtype.itemsize * PAGE_SIZE


def check_fits(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise CapacityError if the weights alone exceed the memory that is free."""
    needed, free = weight_bytes(config, dtype, device), free_bytes(device)
    expanded = device.type != "cuda" and config.quantization != "none"
    if free is not None and needed > free:
        raise CapacityError(
            f"the weights take {needed / _GIB:,.1f} GiB as {str(dtype).removeprefix('torch.')}"
            f"{', quantised ones expanded' if expanded else ''}, but {device} has "
            f"{free / _GIB:,.1f} GiB free; take a machine with more memory, or a narrower dtype"
        )


def check_room(
    places: int, asked: int, size: int, device: torch.device, taken: int = 0
) -> int | None:
    """The bytes that are free beside `taken` ones. Raises CapacityError if the scratch pages of
    `places` requests, or the cache pages `asked` for, of `size` bytes each, do not fit into them.

    taken: of weights that are to be loaded, so that nobody waits for them first.
    """
    free = free_bytes(device)
    if free is None:
        return None
    free = max(0, free - taken)
    if places * size > free:
        raise CapacityError(
            f"max_requests {places} take {places * size / _GIB:,.1f} GiB for the rows of their "
            f"trees alone, but {device} has {free / _GIB:,.1f} GiB free; ask for fewer"
        )
    if asked * size > free:
        raise CapacityError(
            f"cache_pages {asked} take {asked * size / _GIB:,.1f} GiB, but {device} has "
            f"{free / _GIB:,.1f} GiB free; ask for at most {free // size}"
        )
    return free


def cache_pages(most: int, size: int, device: torch.device, free: int | None) -> int:
    """Pages to allocate where none were asked for, `size` bytes each: as far as `most` fit."""
    affordable = _CPU_CACHE_BYTES
    if device.type == "cuda" and free is not None:
        affordable = int(free * CUDA_CACHE_SHARE)
    return max(1, min(most, affordable // size))
