"""What `load_target` takes for kernels, from the config alone: the layouts of their packing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kdtree_engine.config import ModelConfig
from kdtree_engine.kernels.experts import ExpertWeight, packed_experts_bytes
from kdtree_engine.kernels.fp8 import BLOCK, Fp8Tensor, blocks_of
from kdtree_engine.kernels.int4 import GROUP, NIBBLES, Int4Tensor
from kdtree_engine.kernels.linear import packed_linear_bytes


def packed_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights in `dtype` as kernels read them, all modules in the config's form.

    Tiles are filled up, FP8 scales stand once a tile, a tied embedding twice; what cannot stay FP8
    is expanded as there. The router counts as `dtype`, the rotary table not at all.
    """
    hidden = config.hidden_size
    elements = config.vocab_size * hidden + hidden  # the embedding and the last norm
    elements += config.num_layers * (2 * hidden + config.kv_lora_rank + (config.q_lora_rank or 0))
    heads = config.num_heads
    elements += config.num_layers * heads * (config.nope_dim + config.v_dim) * config.kv_lora_rank
    total = elements * dtype.itemsize
    total += packed_linear_bytes([config.vocab_size], hidden, dtype, False)
    moe = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    total += config.num_layers * _attention(config, dtype) + moe * _mixture(config, dtype)
    inner, fp8 = config.intermediate_size, config.quantization == "fp8"
    mlp = packed_linear_bytes([inner, inner], hidden, dtype, fp8)
    mlp += packed_linear_bytes([hidden], inner, dtype, fp8)
    return total + (config.num_layers - moe) * mlp


def _attention(config: ModelConfig, dtype: torch.dtype) -> int:
    """The products of one layer, but for kv_b_proj, which is split by heads."""
    hidden, query = config.hidden_size, config.num_heads * (config.nope_dim + config.rope_dim)
    rank, fp8 = config.q_lora_rank, config.quantization == "fp8"
    total = packed_linear_bytes([rank or query, config.latent_dim], hidden, dtype, fp8)
    if rank is not None:
        total += packed_linear_bytes([query], rank, dtype, fp8)
    return total + packed_linear_bytes([hidden], config.num_heads * config.v_dim, dtype, fp8)


def _mixture(config: ModelConfig, dtype: torch.dtype) -> int:
    """One layer's router with its float32 bias, shared and routed experts."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    shared = config.num_shared_experts * inner
    columns = packed_linear_bytes([config.num_experts + 2 * shared], hidden, dtype, False)
    form: Callable[[int, int, torch.dtype], ExpertWeight] = _dense
    if config.quantization == "int4":
        form = _int4
    elif config.quantization == "fp8" and inner % BLOCK == 0:
        form = _fp8
    routed = packed_experts_bytes(
        form(2 * inner, hidden, dtype),
        form(hidden, inner, dtype),
        _dense(hidden, shared, dtype) if shared else None,
        config.num_experts,
        dtype,
    )
    return config.num_experts * torch.float32.itemsize + columns + routed


def _dense(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


def _fp8(rows: int, columns: int, _: torch.dtype) -> Fp8Tensor:
    scales = torch.empty(blocks_of(rows, columns), device="meta")
    return Fp8Tensor(_dense(rows, columns, torch.float8_e4m3fn), scales)


def _int4(rows: int, columns: int, _: torch.dtype) -> Int4Tensor:
    words = _dense(rows, columns // NIBBLES, torch.int32)
    return Int4Tensor(words, _dense(rows, columns // GROUP, torch.bfloat16))
