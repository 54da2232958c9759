"""OLMo Hybrid: Gated DeltaNet (negative eigenvalues allowed) beside attention, dense."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as hf

from harts.models.fused.adapters import fused_adapters
from harts.models.linear_layers import convolve, linear_core, pack, unpack
from harts.models.protocol import Family
from harts.models.tree_run import TreeRun


class TreeOlmoHybridGatedDeltaNet(hf.OlmoHybridGatedDeltaNet):
    """GDN over a tree; hidden_states (1, C, hidden) -> (1, C, hidden)."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, tree: TreeRun | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        rows = pack(hidden_states, tree)
        query, key, value = convolve(
            [self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)],
            self.conv1d,
            self.activation,
            tree,
            unit_widths=(self.head_k_dim, self.head_k_dim, None),
        )
        beta = self.b_proj(rows).sigmoid()
        if self.allow_neg_eigval:
            beta = beta * 2.0
        step = self.a_proj(rows).float() + self.dt_bias
        log_decay = -self.A_log.float().exp() * F.softplus(step)
        output = linear_core(
            query.view(-1, self.num_k_heads, self.head_k_dim),
            key.view(-1, self.num_k_heads, self.head_k_dim),
            value.view(-1, self.num_v_heads, self.head_v_dim),
            log_decay[..., None],
            beta,
            tree,
        )
        gate = self.g_proj(rows).view(-1, self.num_v_heads, self.head_v_dim)
        return unpack(self.o_proj(self.o_norm(output, gate).flatten(1)), tree)


FAMILY = Family(
    model_type="olmo_hybrid",
    architectures=(hf.OlmoHybridForCausalLM,),
    linear_mixers={hf.OlmoHybridGatedDeltaNet: TreeOlmoHybridGatedDeltaNet},
    attention=(hf.OlmoHybridAttention,),
    fused=fused_adapters(hf),
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
