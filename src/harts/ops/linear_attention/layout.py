"""Row tensors as fla's kernels take them, and gradients of value heads that share a key head."""

from __future__ import annotations

import torch


def batched(x: torch.Tensor) -> torch.Tensor:
    """With fla's batch dimension; its kernels read rows without strides."""
    return x.contiguous().unsqueeze(0)


def over_group(gradient: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """(P, G, K) summed over the value heads that share a key head: (P, H, K)."""
    num_heads = gradient.shape[1]
    if num_heads == num_key_heads:
        return gradient
    return gradient.unflatten(1, (num_key_heads, num_heads // num_key_heads)).sum(2)
