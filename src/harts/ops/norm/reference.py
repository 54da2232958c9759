"""RMS normalisation in plain PyTorch, rounded where transformers rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scaling: str
) -> torch.Tensor:
    """See `harts.ops.norm.rms_norm`."""
    normalised = _normalised(x, eps)
    if scaling == "rounded":
        return weight * normalised.to(x.dtype)
    if scaling == "wide":
        return (weight * normalised).to(x.dtype)
    return (normalised * (1.0 + weight.to(normalised.dtype))).to(x.dtype)


def gated_rms_norm_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
    scaling: str,
) -> torch.Tensor:
    """See `harts.ops.norm.gated_rms_norm`."""
    normalised = _normalised(x, eps)
    wide = normalised.dtype
    if scaling == "rounded":
        normed = weight * normalised.to(x.dtype)
    else:
        normed = weight.to(wide) * normalised
    open_ = (torch.sigmoid if activation == "sigmoid" else F.silu)(gate.to(wide))
    return (normed * open_).to(x.dtype)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
