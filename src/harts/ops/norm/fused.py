"""RMS normalisation as one kernel forward and one backward. Import it where it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.ops.norm import kernels


def rms_norm_fused(x: torch.Tensor, weight: torch.Tensor, eps: float, scaling: str) -> torch.Tensor:
    """See `harts.ops.norm.rms_norm`."""
    y: torch.Tensor = _RmsNorm.apply(x, weight, eps, scaling)  # type: ignore[no-untyped-call]
    return y


def gated_rms_norm_fused(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
    scaling: str,
) -> torch.Tensor:
    """See `harts.ops.norm.gated_rms_norm`."""
    y: torch.Tensor = _GatedRmsNorm.apply(  # type: ignore[no-untyped-call]
        x, gate, weight, eps, activation, scaling
    )
    return y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, scaling: str
    ) -> torch.Tensor:
        y, rstd = kernels.norm_rows(x, weight, eps, scaling)
        ctx.save_for_backward(x, weight, rstd)
        ctx.scaling = scaling
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = kernels.norm_rows_backward(
            x, weight, rstd, dy, ctx.scaling, weight_gradient=ctx.needs_input_grad[1]
        )
        return dx, dweight, None, None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        activation: str,
        scaling: str,
    ) -> torch.Tensor:
        y, rstd = kernels.gated_norm_rows(x, gate, weight, eps, activation, scaling)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        dx, dgate, dweight = kernels.gated_norm_rows_backward(
            x,
            gate,
            weight,
            rstd,
            dy,
            ctx.activation,
            weight_gradient=ctx.needs_input_grad[2],
        )
        return dx, dgate, dweight, None, None, None
