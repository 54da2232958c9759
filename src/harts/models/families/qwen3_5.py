"""Qwen3.5 and 3.6, dense text models: Gated DeltaNet beside gated GQA."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from harts.models.fused.adapters import fused_adapters
from harts.models.linear_layers import gated_delta_decay, linear_core, pack, unpack
from harts.models.protocol import Family
from harts.models.tree_run import TreeRun
from harts.ops.projections import project


class TreeQwen3_5GatedDeltaNet(hf.Qwen3_5GatedDeltaNet):  # noqa: N801
    """GDN over a tree; hidden_states (1, C, hidden) -> (1, C, hidden)."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, tree: TreeRun | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if tree is None:
            return super().forward(hidden_states, *args, **kwargs)
        return gated_delta_net(self, hidden_states, tree)


def gated_delta_net(layer: Any, hidden_states: torch.Tensor, tree: TreeRun) -> torch.Tensor:
    """The layer of Qwen3.5, dense and MoE: separate projections of q, k, v, z, b and a."""
    rows = pack(hidden_states, tree)
    streams, z, step, beta = project(
        rows, layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_a, layer.in_proj_b
    )
    output = linear_core(
        streams.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1),
        layer.conv1d,
        layer.activation,
        gated_delta_decay(step, layer),
        beta.sigmoid(),
        tree,
        key_width=layer.head_k_dim,
        value_width=layer.head_v_dim,
    )
    z = z.view(-1, layer.num_v_heads, layer.head_v_dim)
    return unpack(layer.out_proj(layer.norm(output, z).flatten(1)), tree)


FAMILY = Family(
    model_type="qwen3_5_text",
    architectures=(hf.Qwen3_5ForCausalLM,),
    linear_mixers={hf.Qwen3_5GatedDeltaNet: TreeQwen3_5GatedDeltaNet},
    attention=(hf.Qwen3_5Attention,),
    fused=fused_adapters(hf),
    token_wise=(
        hf.Qwen3_5TextModel,
        hf.Qwen3_5DecoderLayer,
        hf.Qwen3_5MLP,
        hf.Qwen3_5RMSNorm,
        hf.Qwen3_5RMSNormGated,
        hf.Qwen3_5TextRotaryEmbedding,
    ),
)
