"""Qwen3.5 and 3.6, dense text models: Gated DeltaNet beside gated GQA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from harts.models.linear_layers import convolve, linear_core
from harts.models.protocol import Family
from harts.views.tree import TreeView


class TreeQwen3_5GatedDeltaNet(hf.Qwen3_5GatedDeltaNet):  # noqa: N801
    """GDN over a tree; hidden_states (1, C, hidden) -> (1, C, hidden)."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, tree: TreeView | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        return gated_delta_net(self, hidden_states, tree)


def gated_delta_net(layer: Any, hidden_states: torch.Tensor, tree: TreeView) -> torch.Tensor:
    """The layer of Qwen3.5, dense and MoE: separate projections of q, k, v, z, b and a."""
    hidden = hidden_states[0]
    mixed = convolve(layer.in_proj_qkv(hidden), layer.conv1d, layer.activation, tree)
    query, key, value = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    step = layer.in_proj_a(hidden).float() + layer.dt_bias
    log_decay = -layer.A_log.float().exp() * F.softplus(step)
    output = linear_core(
        query.view(-1, layer.num_k_heads, layer.head_k_dim),
        key.view(-1, layer.num_k_heads, layer.head_k_dim),
        value.view(-1, layer.num_v_heads, layer.head_v_dim),
        log_decay[..., None],
        layer.in_proj_b(hidden).sigmoid(),
        tree,
    )
    z = layer.in_proj_z(hidden).view(-1, layer.num_v_heads, layer.head_v_dim)
    return layer.out_proj(layer.norm(output, z).flatten(1))[None]


FAMILY = Family(
    model_type="qwen3_5_text",
    architectures=(hf.Qwen3_5ForCausalLM,),
    linear_mixers={hf.Qwen3_5GatedDeltaNet: TreeQwen3_5GatedDeltaNet},
    attention=(hf.Qwen3_5Attention,),
    token_wise=(
        hf.Qwen3_5TextModel,
        hf.Qwen3_5DecoderLayer,
        hf.Qwen3_5MLP,
        hf.Qwen3_5RMSNorm,
        hf.Qwen3_5RMSNormGated,
        hf.Qwen3_5TextRotaryEmbedding,
    ),
)
