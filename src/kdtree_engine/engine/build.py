"""Resolve what a user asked for into an engine: folders, device, dtype, drafter, cache size."""

from __future__ import annotations

import importlib.resources
import importlib.util
import logging
import re
from os import PathLike
from pathlib import Path

import torch

from kdtree_engine.cache import CacheLayout, allocate_pool, pages_for
from kdtree_engine.checkpoints import (
    ModelCheckpoint,
    check_drafter,
    find_folder,
    open_drafter,
    open_model,
)
from kdtree_engine.checkpoints.model_config import CONFIG_FILE
from kdtree_engine.checkpoints.reader import check_folder, present, read_json
from kdtree_engine.checkpoints.revision import revision_warning
from kdtree_engine.config import EngineConfig, ModelConfig
from kdtree_engine.drafter.base import Drafter
from kdtree_engine.drafter.dflash import DFlashDrafter
from kdtree_engine.drafter.dflash_model import DFlashModel
from kdtree_engine.drafter.load import load_drafter
from kdtree_engine.drafter.ngram import NgramDrafter
from kdtree_engine.drafter.none import NoDrafter
from kdtree_engine.drafter.random import RandomDrafter
from kdtree_engine.engine.loop import Engine
from kdtree_engine.engine.memory import (
    cache_pages,
    check_fits,
    check_room,
    page_bytes,
    weight_bytes,
)
from kdtree_engine.errors import ConfigError, OptionError, TokenizerError, shown
from kdtree_engine.model import load_target
from kdtree_engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

STOP_NAMES = ("[EOS]", "<|im_end|>", "[EOT]")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

DrafterChoice = str | PathLike[str] | Drafter


def packaged_model() -> Path:
    """Folder of the model that comes with the package: target/ and drafter/."""
    return Path(str(importlib.resources.files("kdtree_engine"))) / "demo"


def resolve_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is one. Raises OptionError."""
    if not isinstance(device, str):
        raise OptionError(f"device {shown(device)} must be a text: auto, cpu, cuda or cuda:N")
    if device == "auto":
        return _with_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", device):
        raise OptionError(f"device {shown(device)} is not one of auto, cpu, cuda, cuda:N")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device {shown(device)} was asked for, but torch sees no CUDA GPU; use --device cpu"
        )
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"device {shown(device)} was asked for, but torch sees "
            f"{torch.cuda.device_count()} CUDA GPUs, counted from 0"
        )
    return _with_kernels(place)


def _with_kernels(place: torch.device) -> torch.device:
    """The same. OptionError for a GPU whose kernels nothing here could compile."""
    if place.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise OptionError(
            f"device {str(place)!r} needs triton, which compiles the kernels and is not installed: "
            "pip install triton, or use --device cpu"
        )
    return place


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on the CPU and bfloat16 on CUDA. Raises OptionError."""
    if isinstance(dtype, str) and dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise OptionError(f"dtype {shown(dtype)} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def open_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's vocabulary, None where it has none."""
    return Tokenizer.from_folder(folder) if Tokenizer.in_folder(folder) else None


def stop_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The config's stop tokens and those that the vocabulary has by name."""
    named = {} if tokenizer is None else tokenizer.special_ids
    return frozenset(config.eos_token_ids) | {named[name] for name in STOP_NAMES if name in named}


def build_engine(
    folder: Path,
    drafter: DrafterChoice,
    device: torch.device,
    dtype: torch.dtype,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
) -> tuple[Engine, tuple[str, ...]]:
    """Load everything and check that it fits together; `config.cache_pages` 0 means as needed.

    Returns the engine, and what was skipped of the folders.
    """
    checkpoint = open_model(folder)
    for note in checkpoint.notes:
        log.info("%s: %s", folder.name, note)
    known = checkpoint.config.vocab_size
    if tokenizer is not None and not tokenizer.fits(known):
        raise TokenizerError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but the model {known}; "
            "the files are not of one model"
        )
    check_fits(checkpoint.config, dtype, device)
    draft_folder = _drafter_folder(folder, drafter)
    if not config.tree_nodes:
        draft_folder = None  # plain decoding: nothing to load
    network, notes = None, checkpoint.notes
    if draft_folder is not None:
        network, said = _load_network(draft_folder, checkpoint, dtype, device)
        notes += said
    size = page_bytes(checkpoint.config, network.config if network else None, dtype)
    room = config.max_requests, config.cache_pages, size, device
    check_room(*room, weight_bytes(checkpoint.config, dtype, device))
    target = load_target(checkpoint, dtype, device)
    free = check_room(*room)
    most = config.max_requests * pages_for(checkpoint.config.max_positions)
    pages = config.cache_pages or cache_pages(most, size, device, free)
    layout = CacheLayout(pages, config.max_requests)
    pool = allocate_pool(
        layout,
        checkpoint.config.num_layers,
        checkpoint.config.latent_dim,
        dtype,
        device,
        *(
            (network.config.num_layers, (network.config.num_kv_heads, network.config.head_dim))
            if network
            else ()
        ),
    )
    chosen: Drafter
    if network is not None:
        chosen = DFlashDrafter(network, target, pool)
    else:
        chosen = _modelless(drafter if config.tree_nodes else "none", checkpoint.config)
    stops = stop_ids(checkpoint.config, tokenizer)
    engine = Engine(target, chosen, pool, config, stops, tokenizer)
    return engine, notes


def _load_network(
    folder: Path, target: ModelCheckpoint, dtype: torch.dtype, device: torch.device
) -> tuple[DFlashModel, tuple[str, ...]]:
    """The network of a drafter that fits the target, and what was skipped of its folder."""
    checkpoint = open_drafter(folder)
    check_drafter(checkpoint.config, target.config)
    for note in checkpoint.notes:
        log.info("%s: %s", folder.name, note)
    configs = (read_json(one, CONFIG_FILE, ConfigError) for one in (folder, target.folder))
    draft_config, target_config = configs
    homes = target.folder.absolute(), target.folder.resolve()
    warning = revision_warning(draft_config, folder.absolute(), target_config, homes)
    if warning is not None:
        log.warning("%s", warning)
    network = load_drafter(checkpoint, dtype, device, target.config.max_positions)
    return network, checkpoint.notes


def _drafter_folder(model: Path, drafter: DrafterChoice) -> Path | None:
    """The folder that holds the drafter, None for drafters without a model."""
    if not isinstance(drafter, str | PathLike):
        if not hasattr(drafter, "propose"):
            raise OptionError(f"drafter {shown(drafter)} is neither a name, a folder nor a drafter")
        return None
    if drafter == "auto":
        own = packaged_model()
        return own / "drafter" if model.resolve() == (own / "target").resolve() else None
    if drafter in ("none", "ngram", "random"):
        return None
    folder = find_folder(drafter)
    if not present(folder):
        raise OptionError(
            f"drafter {shown(str(drafter))} is neither a folder nor one of auto, none, ngram, "
            "random"
        )
    check_folder(folder)
    return folder


def _modelless(drafter: DrafterChoice, config: ModelConfig) -> Drafter:
    if drafter == "none":
        return NoDrafter()
    if drafter == "random":
        return RandomDrafter(config.vocab_size)
    if drafter in ("auto", "ngram"):
        return NgramDrafter()
    assert not isinstance(drafter, str | PathLike)
    return drafter
