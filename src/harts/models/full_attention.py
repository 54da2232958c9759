"""Full attention through transformers' attention interface, under the name "harts".

With `tree` in the keyword arguments it is tree attention; without, it is SDPA with SDPA's mask,
so that an attached model still generates and evaluates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from harts.errors import UnsupportedModelError
from harts.models.tree_run import TreeRun
from harts.ops.attention import tree_attention

IMPLEMENTATION = "harts"


def tree_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: TreeRun | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, H, C, D), key (1, G, C, D), value (1, G, C, V) -> (1, C, H, V)."""
    if tree is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if dropout:
        raise UnsupportedModelError(
            f"attention_dropout is {dropout}; shared rows would share their dropout, set it to 0"
        )
    if sliding_window is not None:
        raise UnsupportedModelError(
            f"layer {getattr(module, 'layer_idx', '?')} has a sliding window of {sliding_window} "
            "tokens; tree attention sees all ancestors, so this model is not supported"
        )
    output = tree_attention(
        # squeeze, since the backward of x[0] would fill and copy a tensor of the size of x
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),
        view=tree.view.attention,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        impl=tree.kernels.attention,
        deterministic=tree.kernels.deterministic,
    )
    return output[None], None


AttentionInterface.register(IMPLEMENTATION, tree_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
