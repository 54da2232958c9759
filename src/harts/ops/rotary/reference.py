"""Assembly of latent attention in plain PyTorch, rounded where transformers rounds.

Legend: C rows, H heads, E and D columns of a head, R rotary columns.
"""

from __future__ import annotations

import torch


def rotate_queries_reference(
    q_CHD: torch.Tensor, cos_CR: torch.Tensor, sin_CR: torch.Tensor
) -> torch.Tensor:
    """See `harts.ops.rotary.rotate_queries`."""
    plain, rotary = q_CHD.tensor_split([q_CHD.shape[2] - cos_CR.shape[1]], dim=2)
    rotated = _rotated(rotary, cos_CR.unsqueeze(1), sin_CR.unsqueeze(1))
    return torch.cat([plain, rotated], dim=2)


def assemble_keys_values_reference(
    kv_CHE: torch.Tensor,
    k_rope_CR: torch.Tensor,
    cos_CR: torch.Tensor | None,
    sin_CR: torch.Tensor | None,
    value_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `harts.ops.rotary.assemble_keys_values`."""
    if cos_CR is not None and sin_CR is not None:
        k_rope_CR = _rotated(k_rope_CR, cos_CR, sin_CR)
    plain, values = kv_CHE.tensor_split([kv_CHE.shape[2] - value_width], dim=2)
    shared = k_rope_CR.unsqueeze(1).expand(-1, kv_CHE.shape[1], -1)
    return torch.cat([plain, shared], dim=2), values.contiguous()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (x[2i], x[2i + 1]) by angle i; both halves apart in the result."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
