"""What a model folder holds and what it would take, from its config and headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from kdtree_engine.checkpoints import open_drafter, open_model
from kdtree_engine.checkpoints.drafter_config import is_drafter
from kdtree_engine.checkpoints.names import PARTS, part_of, skipped_kind
from kdtree_engine.checkpoints.templates import default_taps
from kdtree_engine.config import PAGE_SIZE, DrafterConfig, ModelConfig
from kdtree_engine.engine.measure.shapes import share
from kdtree_engine.engine.memory import CUDA_CACHE_SHARE, page_bytes, parameters, weight_bytes
from kdtree_engine.errors import OptionError
from kdtree_engine.kernels.int4 import GROUP

RANKS = (1, 2, 4, 8)
GPU_BYTES = {
    "H100": 85_500_000_000,
    "PRO 6000": 102_600_000_000,
    "H200": 139 << 30,  # the one that we saw; the others from memory
    "B200": 192_000_000_000,
    "B300": 288_000_000_000,
}
"""About what torch reports, which is not the GB of a card's name."""
TAPS = 6  # of the published drafters for K2.6


@dataclass(frozen=True)
class RankShare:
    """One of `gpus` tensor-parallel ranks, in bf16 on CUDA, without a drafter.

    weight_bytes: None where the model does not divide. cache_tokens: by the name in GPU_BYTES, the
    tokens that fit in the share of the rest that the engine gives to the cache; None where the
    weights do not fit. Every rank has all of the cache, so ranks do not add up.
    """

    gpus: int
    weight_bytes: int | None
    cache_tokens: dict[str, int | None]


@dataclass(frozen=True)
class TargetReport:
    """A target's folder. Bytes are those of the files, without their headers."""

    folder: Path
    config: ModelConfig
    total_parameters: int
    active_parameters: int  # read for one token: the chosen experts, one row of the embedding
    part_bytes: dict[str, int]  # by names.PARTS
    skipped: dict[str, int]  # bytes of the skipped part, by kind
    tensors: int
    default_taps: tuple[int, ...]
    kv_bytes_per_token: int
    ranks: tuple[RankShare, ...]
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Of all tensors."""
        return sum(self.part_bytes.values())


@dataclass(frozen=True)
class DrafterReport:
    """A drafter's folder."""

    folder: Path
    config: DrafterConfig
    total_parameters: int
    total_bytes: int
    tensors: int
    kv_bytes_per_token: int  # of its context keys and values, bf16
    notes: tuple[str, ...]


def describe(folder: Path) -> TargetReport | DrafterReport:
    """Open a folder and describe it. ConfigError, CheckpointError or DrafterError as opening."""
    return _drafter(folder) if is_drafter(folder) else _target(folder)


def rank_share(config: ModelConfig, gpus: int) -> RankShare:
    """What one of `gpus` ranks takes and has left."""
    none = RankShare(gpus, None, dict.fromkeys(GPU_BYTES))
    try:
        own = share(config, gpus)
    except OptionError:
        return none
    if config.quantization == "int4" and own.moe_intermediate_size % GROUP:
        return none  # down's groups of inputs cannot be cut
    weights = weight_bytes(own, torch.bfloat16, torch.device("cuda"))
    token = _token_bytes(config)
    tokens: dict[str, int | None] = {}
    for name, size in GPU_BYTES.items():
        left = size - weights
        tokens[name] = int(left * CUDA_CACHE_SHARE) // token if left > 0 else None
    return RankShare(gpus, weights, tokens)


def _target(folder: Path) -> TargetReport:
    checkpoint = open_model(folder)
    config = checkpoint.config
    parts, skipped = Counter(dict.fromkeys(PARTS, 0)), Counter[str]()
    headers = checkpoint.headers()
    for name, stored in headers.items():
        part, size = part_of(name, config), stored.nbytes
        parts[part] += size
        if part == "skipped":
            skipped[str(skipped_kind(name, config))] += size
    dense, experts = parameters(config)
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    active = dense - unread + experts * config.experts_per_token // config.num_experts
    checkpoint.close()
    return TargetReport(
        folder,
        config,
        dense + experts,
        active,
        dict(parts),
        dict(skipped),
        len(headers),
        default_taps(config.num_layers, TAPS),
        _token_bytes(config),
        tuple(rank_share(config, gpus) for gpus in RANKS),
        checkpoint.notes,
    )


def _drafter(folder: Path) -> DrafterReport:
    checkpoint = open_drafter(folder)
    config, headers = checkpoint.config, checkpoint.headers().values()
    checkpoint.close()
    kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return DrafterReport(
        folder,
        config,
        sum(stored.elements for stored in headers),
        sum(stored.nbytes for stored in headers),
        len(headers),
        kept * torch.bfloat16.itemsize,
        checkpoint.notes,
    )


def _token_bytes(config: ModelConfig) -> int:
    return page_bytes(config, None, torch.bfloat16) // PAGE_SIZE
