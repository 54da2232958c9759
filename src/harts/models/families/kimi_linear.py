"""Kimi Linear: KDA with low-rank gates beside MLA without positions, MoE with sigmoid router."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.kimi_linear import modeling_kimi_linear as hf

from harts.models.linear_layers import convolve, linear_core
from harts.models.protocol import Family
from harts.views.tree import TreeView


class TreeKimiLinearDeltaAttention(hf.KimiLinearDeltaAttention):
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
        gate = self.g_b_proj(self.g_a_proj(hidden)).view(heads)
        return self.o_proj(self.o_norm(output, gate).flatten(1))[None]


FAMILY = Family(
    model_type="kimi_linear",
    architectures=(hf.KimiLinearForCausalLM,),
    linear_mixers={hf.KimiLinearDeltaAttention: TreeKimiLinearDeltaAttention},
    attention=(hf.KimiLinearAttention,),
    routers={hf.KimiLinearTopkRouter: "sigmoid"},
    token_wise=(
        hf.KimiLinearModel,
        hf.KimiLinearDecoderLayer,
        hf.KimiLinearMoE,
        hf.KimiLinearExperts,
        hf.KimiLinearMLP,
        hf.KimiLinearForgetGate,
        hf.KimiLinearRMSNorm,
        hf.KimiLinearRMSNormGated,
    ),
)
