"""Tree attention with the dense C x C mask and plain autograd: the twin to compare with.

Legend: C rows, H query heads, G key heads, D key width, V value width.
"""

from __future__ import annotations

import torch

from harts.views.attention import AttentionView


def dense_attention(
    q_CHD: torch.Tensor,
    k_CGD: torch.Tensor,
    v_CGV: torch.Tensor,
    view: AttentionView,
    scale: float,
) -> torch.Tensor:
    """(C, H, V): row k is visible to row q iff k <= q < end[k]. Costs H x C x C memory."""
    dtype = q_CHD.dtype
    compute_dtype = torch.float32 if dtype.itemsize < 4 else dtype
    repeats = q_CHD.shape[1] // k_CGD.shape[1]
    q = q_CHD.to(compute_dtype).transpose(0, 1)
    k = k_CGD.to(compute_dtype).transpose(0, 1).repeat_interleave(repeats, dim=0)
    v = v_CGV.to(compute_dtype).transpose(0, 1).repeat_interleave(repeats, dim=0)
    row = torch.arange(view.end.numel(), device=q.device)
    visible = (row <= row[:, None]) & (row[:, None] < view.end)
    scores_HCC = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
    return (scores_HCC.softmax(dim=-1) @ v).transpose(0, 1).to(dtype)
