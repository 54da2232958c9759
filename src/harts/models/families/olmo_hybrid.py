"""OLMo Hybrid: Gated DeltaNet (negative eigenvalues allowed) beside attention, dense."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as hf

from harts.models.fused.adapters import fused_adapters
from harts.models.linear_layers import gated_delta_decay, linear_core, pack, unpack
from harts.models.protocol import Family
from harts.models.tree_run import TreeRun
from harts.ops.projections import project


class TreeOlmoHybridGatedDeltaNet(hf.OlmoHybridGatedDeltaNet):
    """GDN over a tree; hidden_states (1, C, hidden) -> (1, C, hidden)."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, tree: TreeRun | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        rows = pack(hidden_states, tree)
        *streams, step, beta, gate = project(
            rows, self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj, self.g_proj
        )
        beta = beta.sigmoid()
        if self.allow_neg_eigval:
            beta = beta * 2.0
        output = linear_core(
            streams,
            self.conv1d,
            self.activation,
            gated_delta_decay(step, self),
            beta,
            tree,
            key_width=self.head_k_dim,
            value_width=self.head_v_dim,
        )
        gate = gate.view(-1, self.num_v_heads, self.head_v_dim)
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
