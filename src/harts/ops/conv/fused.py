"""Convolution, activation and head norm in one pass over packed rows, through the window table.

Forward reads each row once from memory (its other taps hit the cache) and writes it once. Backward
is two passes: the gradient of the sums, from which the weights take theirs, and then each row
collects what its readers owe it, those in other chains in the order of the view.

Legend: P packed rows, D channels, W width of the kernel, T row tiles of a weight gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.errors import ConfigError
from harts.ops.conv.fused_kernels import MAX_WIDTH, convolve_rows, sum_gradients, taps_gradient
from harts.views.conv import ConvView

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def causal_conv_fused(
    x_PD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    view: ConvView,
    activation: str | None,
    unit_width: int | None,
) -> torch.Tensor:
    """(P, D) in x's dtype; arguments as in `causal_conv`, already checked.

    x may be a slice of wider rows. Raises ConfigError for float64, for heads of more than 1024
    channels and for more than 4 taps.
    """
    dtypes = [t.dtype for t in (x_PD, weight_DW, bias_D) if t is not None]
    if any(dtype not in _DTYPES for dtype in dtypes):
        raise ConfigError(
            f"causal_conv: impl 'fused' computes in float32, got {dtypes}; use 'reference'"
        )
    if unit_width is not None and unit_width > 1024:
        raise ConfigError(f"causal_conv: impl 'fused' takes unit_width to 1024, got {unit_width}")
    if view.width > MAX_WIDTH:
        raise ConfigError(
            f"causal_conv: impl 'fused' takes kernels to width {MAX_WIDTH}, got {view.width}; "
            "use 'reference'"
        )
    y: torch.Tensor = _FusedConv.apply(x_PD, weight_DW, bias_D, view, activation, unit_width)
    return y


class _FusedConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        view: ConvView,
        activation: str | None,
        unit_width: int | None,
    ) -> torch.Tensor:
        x, weight = _unit_stride(x), weight.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.view, ctx.activation, ctx.unit_width = view, activation, unit_width
        with torch.cuda.device_of(x):
            return convolve_rows(x, weight, bias, view, activation, unit_width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        view: ConvView = ctx.view
        with torch.cuda.device_of(x):
            d_sums, d_weight_TDW, d_bias_TD = sum_gradients(
                x, weight, bias, _unit_stride(d_y), view, ctx.activation, ctx.unit_width
            )
            d_x = taps_gradient(d_sums, weight, view) if ctx.needs_input_grad[0] else None
        d_weight = d_weight_TDW.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            d_bias = d_bias_TD.sum(0).to(bias.dtype)
        return d_x, d_weight, d_bias, None, None, None


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
