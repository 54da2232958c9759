"""Causal depthwise convolution in plain PyTorch: shifted multiply-adds on the extended rows.

Legend: C packed rows, P extended rows, D channels, W width of the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from harts.ops.gather import gather_rows
from harts.views.conv import ConvView

UNIT_EPSILON = 1e-6
"""Added to a sum of squares before its root, as transformers and fla do."""


def causal_conv_reference(
    x_CD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    view: ConvView,
    activation: str | None,
    unit_width: int | None,
) -> torch.Tensor:
    """(C, D) in x's dtype; arguments as in `causal_conv`, already checked."""
    dtype = torch.promote_types(torch.promote_types(x_CD.dtype, weight_DW.dtype), torch.float32)
    extended = gather_rows(x_CD, view.extended).to(dtype)
    first_row = view.extended.own - (view.width - 1)
    y: torch.Tensor = _Windows.apply(extended, weight_DW.to(dtype).t().contiguous(), first_row)
    if bias_D is not None:
        y = y + bias_D.to(dtype)
    if activation == "silu":
        y = torch.nn.functional.silu(y)
    if unit_width is not None:
        heads = y.unflatten(1, (-1, unit_width))
        y = (heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + UNIT_EPSILON)).flatten(1)
    return y.to(x_CD.dtype)


class _Windows(torch.autograd.Function):
    """y[c] = sum over t of taps[t] * rows[first_row[c] + t].

    Computed for every window of the packed rows, those across two chains included, and then
    selected: contiguous shifts are faster than W gathers, and grouped conv1d than neither.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows_PD: torch.Tensor, taps_WD: torch.Tensor, first_row_C: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_PD, taps_WD, first_row_C)
        shifted = _shifts(rows_PD, len(taps_WD))
        windows = shifted[0] * taps_WD[0]
        for rows, tap in zip(shifted[1:], taps_WD[1:], strict=True):
            windows.addcmul_(rows, tap)
        return windows.index_select(0, first_row_C)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_CD: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, taps, first_row = ctx.saved_tensors
        shifted = _shifts(rows, len(taps))
        grad = torch.zeros_like(shifted[0]).index_copy_(0, first_row, grad_CD)
        grad_rows = grad_taps = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.zeros_like(rows)
            for shifted_grad, tap in zip(_shifts(grad_rows, len(taps)), taps, strict=True):
                shifted_grad.addcmul_(grad, tap)
        if ctx.needs_input_grad[1]:
            grad_taps = torch.stack([(x * grad).sum(0) for x in shifted])
        return grad_rows, grad_taps, None


def _shifts(rows: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Views rows[t : P - W + 1 + t] for each tap t."""
    num_windows = rows.shape[0] - width + 1
    return [rows[tap : num_windows + tap] for tap in range(width)]
