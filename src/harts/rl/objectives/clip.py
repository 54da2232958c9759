"""The clipped surrogate of PPO (arXiv 1707.06347, Equation 7), asymmetric and dual variants."""

from __future__ import annotations

import torch

# exp() of more would overflow float32 and turn a clipped, zero gradient into 0 * inf = NaN.
MAX_LOG_RATIO = 20.0


def importance_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), constant from MAX_LOG_RATIO on."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


def clipped_surrogate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None,
) -> torch.Tensor:
    """Loss of each token: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    With clip_ratio_c the loss of a token with A < 0 is at most -clip_ratio_c A (dual clip, arXiv
    1912.09729): one token that was very unlikely before cannot dominate a step.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    if clip_ratio_c is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, clip_ratio_c * advantages), gain)
    return -gain


def is_clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None,
) -> torch.Tensor:
    """bool, true where clipping (either kind) removes the token's gradient."""
    clipped = (ratio > 1.0 + clip_high) & (advantages > 0)
    clipped |= (ratio < 1.0 - clip_low) & (advantages < 0)
    if clip_ratio_c is not None:
        clipped |= (ratio > clip_ratio_c) & (advantages < 0)
    return clipped
