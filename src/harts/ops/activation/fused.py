"""Gates as one kernel forward and one backward. Import it where it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.ops.activation import kernels


def swiglu_fused(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `harts.ops.activation.swiglu`."""
    y: torch.Tensor = _Swiglu.apply(  # type: ignore[no-untyped-call]
        gate.contiguous(), up.contiguous()
    )
    return y


def gate_heads_fused(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """See `harts.ops.activation.gate_heads`."""
    y: torch.Tensor = _GateHeads.apply(  # type: ignore[no-untyped-call]
        x.contiguous(), logits.contiguous()
    )
    return y


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return kernels.swiglu_elements(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return kernels.swiglu_elements_backward(gate, up, dy.contiguous())


class _GateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, logits)
        return kernels.gate_vectors(x, logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, logits = ctx.saved_tensors
        return kernels.gate_vectors_backward(x, logits, dy.contiguous())
