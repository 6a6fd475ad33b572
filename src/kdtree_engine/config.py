"""Frozen configuration values, resolved once when a checkpoint or an engine is opened.

Nothing here reads files or the environment: `checkpoints/` turns a config.json into these values,
and the engine and the command fill in the rest. All sizes are element counts, all positions are
absolute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PAGE_SIZE = 64
"""Tokens in one cache page; also the width of an attention tile (docs/exactness.md)."""

MAX_ROWS_PER_REQUEST = 64
"""Rows of one request in one decode step: the root and 63 nodes, so one 64-bit word holds
ancestors.
"""

MAX_SEED = 2**63 - 1
"""The largest seed that a generator of torch takes: of new weights and of training."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one network: plain (`kind="default"`) or YaRN (`kind="yarn"`).

    YaRN follows arXiv 2309.00071 as DeepSeek-V3 applies it: static, from position 0 on.
    `attention_factor` multiplies cos and sin; None means g(mscale) / g(mscale_all_dim).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    def gain(self, mscale: float) -> float:
        """YaRN's g(m) = 0.1 m ln(factor) + 1; 1 for plain RoPE or a factor of at most 1."""
        if self.kind != "yarn" or self.factor <= 1.0:
            return 1.0
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self.gain(self.mscale) / self.gain(self.mscale_all_dim)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a DeepSeek-V3 / Kimi-K2 class target. Read every value from the checkpoint's
    config.json.
    """

    family: str  # "deepseek-v3", "k2", "k2-thinking", "k2.5" (K2.5 and K2.6 share it)
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    num_groups: int
    top_groups: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    first_dense_layers: int
    moe_layer_freq: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_word_embeddings: bool = False
    # "none", "int4" (routed experts, groups of 32 inputs) or "fp8" (projections, blocks 128 x 128)
    quantization: str = "none"
    tensor_prefix: str = ""  # "language_model." in K2.5 and K2.6 folders
    num_mtp_layers: int = 0
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default_factory=tuple)

    @property
    def latent_dim(self) -> int:
        """Width of one cached row: the normalised latent, then the rotated k_pe."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-0.5 g(mscale_all_dim)^2; the absorbed form keeps it."""
        gain = self.rope.gain(self.rope.mscale_all_dim)
        return gain * gain / math.sqrt(self.nope_dim + self.rope_dim)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether 0-based `layer` has routed experts instead of a dense MLP."""
        return layer >= self.first_dense_layers and layer % self.moe_layer_freq == 0


@dataclass(frozen=True)
class DraftMask:
    """What the rows of a block see in one layer of a drafter, itself always included.

    The context before the root and the rows of the block, further ones only within these limits.
    """

    causal: bool = False  # in the block, only the rows up to one's own
    window: int | None = None  # of the context, only the last so many tokens before the root
    sliding: int | None = None  # only what is closer than this, in context and block: |q - k| < it


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a DFlash drafter, whatever its layout (docs/checkpoints.md)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int  # slots of a block, the root in slot 0
    mask_token_id: int
    tap_layers: tuple[
        int, ...
    ]  # 0-based target layers whose outputs are the taps, in concatenation order
    num_target_layers: int | None  # None: the layout does not say (speculators)
    rms_norm_eps: float
    rope: RopeConfig
    masks: tuple[DraftMask, ...]  # one a layer
    max_positions: int = 0
    draft_vocab_size: int | None = None  # rows of the drafter's own head; None: vocab_size
    from_anchor: bool = False  # slot k guesses the token after its own, so the root's guesses too

    @property
    def horizon(self) -> int:
        """Positions drafted in one pass."""
        return self.block_size - (not self.from_anchor)

    @property
    def reduced(self) -> bool:
        """Whether the drafter guesses among a part of the vocabulary only."""
        return self.draft_vocab_size not in (None, self.vocab_size)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs, apart from the model: validated by `engine.llm.LLM`."""

    tree_nodes: int = 15  # nodes besides the root, 0..63
    chain: bool = False  # a single path of `tree_nodes` nodes instead of a best-first tree
    prefill_chunk: int = 512  # prompt tokens of one request in one step
    cache_pages: int = 0  # pages of PAGE_SIZE tokens
    max_requests: int = 8  # requests decoding at once
    eager: bool = False  # on CUDA: launch every operator instead of replaying graphs
