"""Qwen3-Next: Gated DeltaNet (grouped value heads) beside gated GQA, MoE with softmax router."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from harts.models.fused.adapters import fused_adapters, fused_experts
from harts.models.linear_layers import gated_delta_decay, linear_core, pack, unpack
from harts.models.protocol import Family
from harts.models.tree_run import TreeRun
from harts.ops.projections import project


class TreeQwen3NextGatedDeltaNet(hf.Qwen3NextGatedDeltaNet):
    """GDN over a tree; hidden_states (1, C, hidden) -> (1, C, hidden)."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, tree: TreeRun | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        rows = pack(hidden_states, tree)[None]
        query, key, value, z, b, a = (
            x.squeeze(0)
            for x in self.fix_query_key_value_ordering(
                *project(rows, self.in_proj_qkvz, self.in_proj_ba)
            )
        )
        output = linear_core(
            [query.flatten(1), key.flatten(1), value.flatten(1)],
            self.conv1d,
            self.activation,
            gated_delta_decay(a, self),
            b.sigmoid(),
            tree,
            key_width=self.head_k_dim,
            value_width=self.head_v_dim,
        )
        return unpack(self.out_proj(self.norm(output, z).flatten(1)), tree)


FAMILY = Family(
    model_type="qwen3_next",
    architectures=(hf.Qwen3NextForCausalLM,),
    linear_mixers={hf.Qwen3NextGatedDeltaNet: TreeQwen3NextGatedDeltaNet},
    attention=(hf.Qwen3NextAttention,),
    routers={hf.Qwen3NextTopKRouter: "softmax"},
    fused=fused_adapters(hf),
    experts=fused_experts(hf),
    token_wise=(
        hf.Qwen3NextModel,
        hf.Qwen3NextDecoderLayer,
        hf.Qwen3NextSparseMoeBlock,
        hf.Qwen3NextExperts,
        hf.Qwen3NextMLP,
        hf.Qwen3NextRMSNorm,
        hf.Qwen3NextRMSNormGated,
        hf.Qwen3NextRotaryEmbedding,
    ),
)
