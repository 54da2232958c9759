"""Gates in plain PyTorch, rounded where transformers rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `harts.ops.activation.swiglu`."""
    return F.silu(gate) * up


def gate_heads_reference(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """See `harts.ops.activation.gate_heads`."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return x * torch.sigmoid(wide).to(x.dtype).unsqueeze(-1)
