"""Ling 3 (`bailing_hybrid`): KDA with a bounded gate beside gated MLA, MoE with sigmoid router."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as hf

from harts.models.linear_layers import convolve, linear_core
from harts.models.protocol import Family
from harts.views.tree import TreeView


class TreeBailingHybridDeltaAttention(hf.BailingHybridDeltaAttention):
    """KDA over a tree; hidden_states (1, C, hidden) -> (1, C, hidden)."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, tree: TreeView | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        heads = (-1, self.num_heads, self.head_dim)
        hidden = hidden_states[0]
        mixed = torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], dim=-1)
        mixed = convolve(mixed, self.conv1d, self.activation, tree)
        query, key, value = (x.view(heads) for x in mixed.split(self.qkv_dim, dim=-1))
        decay = self.forget_gate(hidden_states)[0]
        beta = torch.sigmoid(self.b_proj(hidden))
        output = linear_core(query, key, value, decay, beta, tree)
        output = self.o_norm(output, self.g_proj(hidden).view(heads))
        return self.o_proj(output.flatten(1))[None]


def _refuse(config: Any) -> str | None:
    if config.num_mtp_layers and config.mtp_loss_scaling_factor:
        return (
            f"mtp_loss_scaling_factor is {config.mtp_loss_scaling_factor}: multi-token prediction "
            "would read across branches; set it to 0"
        )
    return None


FAMILY = Family(
    model_type="bailing_hybrid",
    architectures=(hf.BailingHybridForCausalLM,),
    linear_mixers={hf.BailingHybridDeltaAttention: TreeBailingHybridDeltaAttention},
    attention=(hf.BailingHybridAttention,),
    routers={hf.BailingHybridTopkRouter: "sigmoid"},
    token_wise=(
        hf.BailingHybridModel,
        hf.BailingHybridDecoderLayer,
        hf.BailingHybridMoE,
        hf.BailingHybridExperts,
        hf.BailingHybridMLP,
        hf.BailingHybridForgetGate,
        hf.BailingHybridRMSNorm,
        hf.BailingHybridRMSNormGated,
        hf.BailingHybridRotaryEmbedding,
    ),
    refuse=_refuse,
)
