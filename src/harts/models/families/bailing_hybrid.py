"""Ling 3 (`bailing_hybrid`): KDA with a bounded gate beside gated MLA, MoE with sigmoid router."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as hf

from harts.models.fused.adapters import fused_adapters, fused_experts
from harts.models.linear_layers import linear_core, pack, unpack
from harts.models.protocol import Family
from harts.models.tree_run import TreeRun
from harts.ops.linear_attention import KdaGate
from harts.ops.projections import project


class TreeBailingHybridDeltaAttention(hf.BailingHybridDeltaAttention):
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
            *(forget.f_proj, self.b_proj, self.g_proj),
        )
        output = linear_core(
            streams,
            self.conv1d,
            self.activation,
            decay.view(heads),
            torch.sigmoid(beta),
            tree,
            key_width=self.head_dim,
            value_width=self.head_dim,
            gate=KdaGate(
                forget.A_log,
                forget.dt_bias.view(self.num_heads, self.head_dim),
                forget.lower_bound if forget.safe_gate else None,
            ),
        )
        output = self.o_norm(output, gate.view(heads))
        return unpack(self.o_proj(output.flatten(1)), tree)


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
    fused=fused_adapters(hf),
    experts=fused_experts(hf),
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
