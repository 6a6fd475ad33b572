"""A model folder that is not there: random tensors of the right shapes, made on the device.

The network is then built by the same code that reads a checkpoint, save that experts laid out for
kernels are made where they lie. Weights have a spread of 1 / sqrt(inputs), so that values stay near
1 through all layers and the router's scores vary; only the embedding's may be larger.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from kdtree_engine.checkpoints import ModelCheckpoint
from kdtree_engine.checkpoints.load import ExpertTensors
from kdtree_engine.checkpoints.names import drafter_tensors as expected_drafter_tensors
from kdtree_engine.checkpoints.names import expected_tensors, expert_module, expert_shape
from kdtree_engine.config import DrafterConfig, ModelConfig
from kdtree_engine.drafter.dflash_model import DFlashModel
from kdtree_engine.drafter.load import build_drafter
from kdtree_engine.errors import OptionError
from kdtree_engine.kernels.experts import random_packed_experts
from kdtree_engine.kernels.int4 import GROUP, NIBBLES, Int4Tensor, dequantise
from kdtree_engine.kernels.router import RouterSettings
from kdtree_engine.model import Kimi
from kdtree_engine.model.load import _Builder
from kdtree_engine.model.moe import PackedMixture

ROUTINGS = ("uniform", "zipf")
LOGIT_SPREAD = 1.0  # of the router's logits, given rows of root mean square 1
APART = 32.0
"""Of the embedding, where rows must choose experts as if independent: attention over one context
makes rows alike, and through tens of layers that shows in the router unless tokens dominate.
"""
_MOST_LOAD = 0.9  # of the rows, to one expert


def random_target(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    routing: str = "uniform",
    seed: int = 0,
    kernels: bool | None = None,
    embedding: float = 1.0,
) -> Kimi:
    """The network of random weights; `kernels` as in load_target, `embedding` the spread of its
    values. OptionError for a routing that there is not.
    """
    checkpoint = RandomCheckpoint(config, device, routing, seed, embedding)
    laid_out = device.type == "cuda" if kernels is None else kernels
    return _RandomBuilder(checkpoint, dtype, device, laid_out).build()


def random_drafter(config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> DFlashModel:
    """A drafter of random weights, laid out for kernels on CUDA."""
    tensors = _DrafterTensors(config, device)
    return build_drafter(config, tensors, dtype, device, kernels=device.type == "cuda")


class _DrafterTensors(dict[str, Tensor]):
    """Tensors by name, each drawn when it is asked for and not kept: two copies need not fit."""

    def __init__(self, config: DrafterConfig, device: torch.device) -> None:
        super().__init__()
        self._specs = expected_drafter_tensors(config)
        self._device = device

    def __missing__(self, name: str) -> Tensor:
        shape = self._specs[name].shape
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return values.normal_(0.0, 1 / math.sqrt(shape[1]))


class _RandomBuilder(_Builder):
    """The loader, without reading and packing 23,040 experts one by one."""

    checkpoint: RandomCheckpoint

    def packed_experts(
        self, index: int, prefix: str, bias: Tensor, settings: RouterSettings
    ) -> PackedMixture:
        """INT4 experts of random words."""
        config = self.config
        if config.quantization != "int4":
            return super().packed_experts(index, prefix, bias, settings)
        shared = config.num_shared_experts * config.moe_intermediate_size
        names = ["gate.weight"]
        if shared:
            names += [f"shared_experts.{name}_proj.weight" for name in ("gate", "up")]
        gate = self.pack([self.raw(prefix + name) for name in names])
        experts = random_packed_experts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            shared,
            self.device,
            self.checkpoint.random(prefix + "experts"),
            self.dtype,
        )
        return PackedMixture(gate, bias, settings, experts, shared, self.dtype)


class RandomCheckpoint(ModelCheckpoint):
    """What load_target reads, drawn anew at each call. `routing`: how the experts are loaded.

    A tensor follows from the seed and its name alone, on the same kind of device.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        routing: str = "uniform",
        seed: int = 0,
        embedding: float = 1.0,
    ) -> None:
        if routing not in ROUTINGS:
            raise OptionError(f"--routing is {routing!r}: expected {' or '.join(ROUTINGS)}")
        self.folder = Path("random weights")
        self.config = config
        self.notes = ()
        self.device = device
        self.routing = routing
        self.seed = seed
        self.embedding = embedding
        self._random = torch.Generator(device)
        self._specs = expected_tensors(config, experts=False)

    def random(self, name: str) -> torch.Generator:
        """The device's generator, set to what `name` draws."""
        return self._random.manual_seed(self.seed ^ zlib.crc32(name.encode()))

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """bfloat16 of the shape that a checkpoint of this config has; the bias is float32."""
        shape = self._specs[name].shape
        if name.endswith("e_score_correction_bias"):
            return self.bias(name)
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self.device)
        spread = self.embedding if "embed_tokens" in name else 1.0 / math.sqrt(shape[1])
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        values.normal_(0.0, spread, generator=self.random(name))
        return values[rows or slice(None), columns or slice(None)]

    def weight(self, module: str) -> Tensor:
        """bfloat16 [out, in]."""
        return self.tensor(f"{module}.weight")

    def experts(self, layer: int) -> RandomExperts:
        """The routed experts of a layer."""
        return RandomExperts(self, layer)

    def bias(self, name: str) -> Tensor:
        """float32 [E]: zeros, or what makes expert loads fall like 1 / rank, ranks shuffled."""
        count = self.config.num_experts
        if self.routing == "uniform":
            return torch.zeros(count, device=self.device)
        order = torch.randperm(count, generator=self.random(name), device=self.device)
        return zipf_bias(count, self.config.experts_per_token, LOGIT_SPREAD).to(self.device)[order]

    def close(self) -> None:
        """No file is open."""


class RandomExperts(ExpertTensors):
    """INT4 words of all bits and even scales; dense where the config declares no quantisation."""

    _checkpoint: RandomCheckpoint

    def __init__(self, checkpoint: RandomCheckpoint, layer: int) -> None:
        self.layer = layer
        self.count = checkpoint.config.num_experts
        self._checkpoint = checkpoint

    def form(self, expert: int, projection: str) -> str:
        """As the config declares."""
        return "int4" if self._checkpoint.config.quantization == "int4" else "dense"

    def weight(self, expert: int, projection: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """bfloat16 [out, in]; there is no FP8 to become `dtype`."""
        if self.form(expert, projection) == "int4":
            return dequantise(self._int4(expert, projection, own=True))
        shape = expert_shape(self._checkpoint.config, projection)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._checkpoint.device)
        random = self._checkpoint.random(expert_module(self.layer, expert, projection))
        return values.normal_(0.0, 1 / math.sqrt(shape[1]), generator=random)

    def _int4(self, expert: int, projection: str, own: bool) -> Int4Tensor:
        """Random nibbles; their spread is 4.6, which the scale takes back."""
        rows, columns = expert_shape(self._checkpoint.config, projection)
        device = self._checkpoint.device
        random = self._checkpoint.random(expert_module(self.layer, expert, projection))
        words = torch.randint(
            -(2**31), 2**31, (rows, columns // NIBBLES), dtype=torch.int32, device=device,
            generator=random,
        )  # fmt: skip
        scale = torch.empty(rows, columns // GROUP, dtype=torch.bfloat16, device=device)
        one = 1 / (4.6 * math.sqrt(columns))
        return Int4Tensor(words, scale.uniform_(0.5 * one, 1.5 * one, generator=random))


def zipf_loads(experts: int, top_k: int) -> Tensor:
    """float64 [E]: the share of rows that choose each expert, falling like 1 / rank, `top_k` in
    all. No expert takes more than 0.9 of the rows; what it would is spread over the others.
    """
    loads = 1.0 / torch.arange(1, experts + 1, dtype=torch.float64)
    loads *= top_k / loads.sum()
    for _ in range(experts):
        capped = loads >= _MOST_LOAD
        rest = top_k - _MOST_LOAD * int(capped.sum())
        free = loads[~capped].sum()
        loads = torch.where(capped, _MOST_LOAD, loads * (rest / free))
        if bool((loads <= _MOST_LOAD).all()):
            break
    return loads


def zipf_bias(experts: int, top_k: int, spread: float) -> Tensor:
    """float32 [E]: added to sigmoid scores of normal logits, it loads experts as `zipf_loads` says.

    An expert is chosen when score + bias exceeds a threshold that hardly varies between rows, so
    the bias is minus the score's quantile at one minus the load.
    """
    loads = zipf_loads(experts, top_k)
    return -torch.sigmoid(spread * torch.special.ndtri(1.0 - loads)).float()
