"""Kimi Linear: KDA with low-rank gates beside MLA without positions, MoE with sigmoid router."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.kimi_linear import modeling_kimi_linear as hf

from harts.models.fused.adapters import fused_adapters, fused_experts
from harts.models.linear_layers import linear_core, pack, unpack
from harts.models.protocol import Family
from harts.models.tree_run import TreeRun
from harts.ops.linear_attention import KdaGate
from harts.ops.projections import project


class TreeKimiLinearDeltaAttention(hf.KimiLinearDeltaAttention):
    """KDA over a tree; hidden_states (1, C, hidden) -> (1, C, hidden)."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, tree: TreeRun | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        heads = (-1, self.num_heads, self.head_dim)
        rows = pack(hidden_states, tree)
        forget = self.forget_gate
        *streams, decay, beta, gate = project(
            rows,
            *(self.q_proj, self.k_proj, self.v_proj),
            *(forget.f_a_proj, self.b_proj, self.g_a_proj),
        )
        output = linear_core(
            streams,
            self.conv1d,
            self.activation,
            forget.f_b_proj(decay).view(heads),
            torch.sigmoid(beta),
            tree,
            key_width=self.head_dim,
            value_width=self.head_dim,
            gate=KdaGate(
                forget.A_log.flatten(), forget.dt_bias.view(self.num_heads, self.head_dim)
            ),
        )
        output = self.o_norm(output, self.g_b_proj(gate).view(heads))
        return unpack(self.o_proj(output.flatten(1)), tree)


FAMILY = Family(
    model_type="kimi_linear",
    architectures=(hf.KimiLinearForCausalLM,),
    linear_mixers={hf.KimiLinearDeltaAttention: TreeKimiLinearDeltaAttention},
    attention=(hf.KimiLinearAttention,),
    routers={hf.KimiLinearTopkRouter: "sigmoid"},
    fused=fused_adapters(hf),
    experts=fused_experts(hf),
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
