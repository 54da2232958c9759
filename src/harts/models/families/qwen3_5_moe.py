"""Qwen3.5 and 3.6 MoE text models: Gated DeltaNet beside gated GQA, softmax router."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

from harts.models.families.qwen3_5 import gated_delta_net
from harts.models.fused.adapters import fused_adapters, fused_experts
from harts.models.protocol import Family
from harts.models.tree_run import TreeRun


class TreeQwen3_5MoeGatedDeltaNet(hf.Qwen3_5MoeGatedDeltaNet):  # noqa: N801
    """GDN over a tree; hidden_states (1, C, hidden) -> (1, C, hidden)."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, tree: TreeRun | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        return gated_delta_net(self, hidden_states, tree)


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architectures=(hf.Qwen3_5MoeForCausalLM,),
    linear_mixers={hf.Qwen3_5MoeGatedDeltaNet: TreeQwen3_5MoeGatedDeltaNet},
    attention=(hf.Qwen3_5MoeAttention,),
    routers={hf.Qwen3_5MoeTopKRouter: "softmax"},
    fused=fused_adapters(hf),
    experts=fused_experts(hf),
    token_wise=(
        hf.Qwen3_5MoeTextModel,
        hf.Qwen3_5MoeDecoderLayer,
        hf.Qwen3_5MoeSparseMoeBlock,
        hf.Qwen3_5MoeExperts,
        hf.Qwen3_5MoeMLP,
        hf.Qwen3_5MoeRMSNorm,
        hf.Qwen3_5MoeRMSNormGated,
        hf.Qwen3_5MoeTextRotaryEmbedding,
    ),
)
