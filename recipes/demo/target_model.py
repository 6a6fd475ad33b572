"""The packaged target: transformers' own DeepSeek-V3 classes, with a faster experts' forward.

The class is transformers' so that our engine meets weights that it did not make itself. Its loop
over experts is slow in training; with sixteen narrow experts it is cheaper to compute all of them
as two plain products and weigh the unchosen ones by zero. Parameters, names and results are the
same (the test at the end of train_target's smoke run compares them).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from int4 import straight_through
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}
THETA = 50_000.0
# Field names are the checkpoint's (text_config of a kimi_k25 folder).
TEXT: dict[str, Any] = {
    "vocab_size": 3072, "hidden_size": 256, "intermediate_size": 768, "moe_intermediate_size": 64,
    "num_hidden_layers": 10, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.827, "kv_lora_rank": 64, "q_lora_rank": 96,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1,
    "hidden_act": "silu", "max_position_embeddings": 2048, "initializer_range": 0.02,
    "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0,
    "tie_word_embeddings": False, "bos_token_id": 2816, "eos_token_id": 2818,
    "pad_token_id": 3071,
}


def transformers_config(text: dict[str, Any]) -> DeepseekV3Config:
    """transformers' form of the checkpoint's fields; its class counts MTP layers by default."""
    rope = {"rope_type" if k == "type" else k: v for k, v in YARN.items()}
    return DeepseekV3Config(
        **text, rope_parameters={**rope, "rope_theta": THETA}, rope_interleave=True,
        num_nextn_predict_layers=0,
    )


def build(text: dict[str, Any]) -> DeepseekV3ForCausalLM:
    """A freshly initialised float32 model.

    Projections into the residual stream start smaller, by the number of additions to it, which
    keeps its size in check at the start; embeddings start wide enough to outweigh them.
    """
    model = DeepseekV3ForCausalLM(transformers_config(text)).float()
    depth = (2 * text["num_hidden_layers"]) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "embed" in name:
                continue
            fan_in = parameter.shape[-1]
            inward = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
            parameter.normal_(0, 0.6 * fan_in**-0.5 * (depth if inward else 1.0))
        model.lm_head.weight.normal_(0, 0.02)
        model.model.embed_tokens.weight.normal_(0, 0.1)
    return model


class BatchedMoE(DeepseekV3MoE):
    """All experts at once, unchosen ones weighed by zero; counts each expert's load.

    Existing modules are turned into this class, so that every layer shares one compiled graph.
    """

    load: torch.Tensor
    switch: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The routed experts' weighted sum, then the shared expert."""
        gate, experts = self.gate, self.experts
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), gate.weight.float()).sigmoid()
            chosen = (scores + gate.e_score_correction_bias).topk(gate.top_k, dim=-1).indices
            mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
            weights = scores * mask
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor
        self.load.add_(mask.detach().sum(0))
        gate_up = straight_through(experts.gate_up_proj, self.switch)
        down = straight_through(experts.down_proj, self.switch)
        hidden = F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, (gate_up.shape[0], -1))
        opened, raised = hidden.chunk(2, dim=-1)
        active = F.silu(opened) * raised * weights.unsqueeze(-1).to(hidden.dtype)
        routed = F.linear(active.flatten(1), down.permute(1, 0, 2).flatten(1))
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states)


class Trainee:
    """The model with its experts' forward replaced, and what training needs to reach in it."""

    def __init__(self, model: DeepseekV3ForCausalLM, device: str, compiled: bool) -> None:
        self.model = model.to(device)
        self.device = device
        self.mixed = device == "cuda"
        self.switch = torch.zeros((), device=device)
        layers = self.model.model.layers
        self.moes = [layer.mlp for layer in layers if isinstance(layer.mlp, DeepseekV3MoE)]
        for moe in self.moes:
            moe.load = torch.zeros(moe.gate.num_experts, device=device)
            moe.switch = self.switch
            moe.__class__ = BatchedMoE
        if compiled:
            torch._dynamo.config.recompile_limit = 64  # one frame serves all layers
            for layer in layers:
                layer.compile(dynamic=False)
        self.head = torch.compile(self._head, dynamic=False) if compiled else self._head

    def _head(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Losses per token; the logits are float32 only inside the compiled function."""
        logits = self.model.lm_head(self.model.model.norm(hidden))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")

    def losses(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of each next token of [batch, length + 1] ids; bf16 arithmetic on a GPU only."""
        ids, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
        body = self.model.model
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.mixed):
            hidden = body.embed_tokens(ids)
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
            rotary = body.rotary_emb(hidden, position_ids=positions)
            for layer in body.layers:
                hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
            return self.head(hidden, labels)

    @torch.no_grad()
    def balance(self, rate: float) -> torch.Tensor:
        """Move each router's bias against its load; returns the largest load over the mean."""
        worst = []
        for moe in self.moes:
            mean = moe.load.mean()
            moe.gate.e_score_correction_bias += rate * torch.sign(mean - moe.load)
            worst.append(moe.load.max() / mean.clamp(min=1))
            moe.load.zero_()
        return torch.stack(worst).max()
