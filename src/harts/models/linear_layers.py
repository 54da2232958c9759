"""The part that all linear-attention layers share: convolution and core over a tree.

Legend: C compact rows, H key heads, G value heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import nn

from harts.ops.conv import causal_conv
from harts.ops.gather import gather_rows
from harts.ops.linear_attention import chunk_kda
from harts.views.tree import TreeView


def convolve(
    mixed: torch.Tensor, conv1d: nn.Conv1d, activation: str, tree: TreeView
) -> torch.Tensor:
    """The depthwise causal convolution of a layer over compact rows; mixed (C, D) -> (C, D)."""
    view = tree.conv[conv1d.kernel_size[0]]
    return causal_conv(
        mixed, conv1d.weight.squeeze(1), conv1d.bias, view=view, activation=activation
    )


def linear_core(
    q_CHK: torch.Tensor,
    k_CHK: torch.Tensor,
    v_CGV: torch.Tensor,
    log_decay_CGK: torch.Tensor,
    beta_CG: torch.Tensor,
    tree: TreeView,
) -> torch.Tensor:
    """The (gated) delta rule over compact rows, (C, G, V); q and k are l2-normalised here.

    log_decay has last dimension 1 for a gate that is equal over the key width (GDN).
    """
    view = tree.linear
    q, k, v, log_decay, beta = (
        gather_rows(x, view.packed)
        for x in (_l2_norm(q_CHK), _l2_norm(k_CHK), v_CGV, log_decay_CGK, beta_CG)
    )
    output, _ = chunk_kda(q, k, v, log_decay, beta, view=view)
    return output.index_select(0, view.packed.own)


def _l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Unit length over the last dimension in float32 at least, as transformers and fla do."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
