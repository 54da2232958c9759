"""OLMo Hybrid: Gated DeltaNet (negative eigenvalues allowed) beside attention, dense."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as hf

from harts.models.linear_layers import convolve, linear_core
from harts.models.protocol import Family
from harts.views.tree import TreeView


class TreeOlmoHybridGatedDeltaNet(hf.OlmoHybridGatedDeltaNet):
    """GDN over a tree; hidden_states (1, C, hidden) -> (1, C, hidden)."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, tree: TreeView | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        hidden = hidden_states[0]
        mixed = torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], dim=-1)
        mixed = convolve(mixed, self.conv1d, self.activation, tree)
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        beta = self.b_proj(hidden).sigmoid()
        if self.allow_neg_eigval:
            beta = beta * 2.0
        step = self.a_proj(hidden).float() + self.dt_bias
        log_decay = -self.A_log.float().exp() * F.softplus(step)
        output = linear_core(
            query.view(-1, self.num_k_heads, self.head_k_dim),
            key.view(-1, self.num_k_heads, self.head_k_dim),
            value.view(-1, self.num_v_heads, self.head_v_dim),
            log_decay[..., None],
            beta,
            tree,
        )
        gate = self.g_proj(hidden).view(-1, self.num_v_heads, self.head_v_dim)
        return self.o_proj(self.o_norm(output, gate).flatten(1))[None]


FAMILY = Family(
    model_type="olmo_hybrid",
    architectures=(hf.OlmoHybridForCausalLM,),
    linear_mixers={hf.OlmoHybridGatedDeltaNet: TreeOlmoHybridGatedDeltaNet},
    attention=(hf.OlmoHybridAttention,),
    token_wise=(
        hf.OlmoHybridModel,
        hf.OlmoHybridAttentionDecoderLayer,
        hf.OlmoHybridLinearAttentionDecoderLayer,
        hf.OlmoHybridMLP,
        hf.OlmoHybridRMSNorm,
        hf.OlmoHybridRMSNormGated,
        hf.OlmoHybridRotaryEmbedding,
    ),
)
