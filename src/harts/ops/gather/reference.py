"""The gathers in plain PyTorch, on any device and in any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from harts.views.gather import RowGather


def gather_rows_reference(x: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """See `harts.ops.gather.gather_rows`."""
    gathered: torch.Tensor = _GatherRows.apply(x, gather)
    return gathered


def own_rows_reference(x: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """See `harts.ops.gather.own_rows`."""
    chosen: torch.Tensor = _OwnRows.apply(x, gather)
    return chosen


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, gather: RowGather) -> torch.Tensor:
        ctx.gather = gather  # type: ignore[attr-defined]
        num_packed, num_compact = gather.source.shape[0], gather.own.shape[0]
        if num_packed == num_compact + gather.extra_packed.shape[0]:
            return x.index_select(0, gather.source)
        packed = x.new_zeros(num_packed, *x.shape[1:])
        packed.index_copy_(0, gather.own, x)
        return packed.index_copy_(0, gather.extra_packed, x.index_select(0, gather.extra_compact))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_packed: torch.Tensor) -> tuple[torch.Tensor, None]:
        gather: RowGather = ctx.gather
        grad = grad_packed.index_select(0, gather.own)
        if gather.repeated.shape[0] == 0:
            return grad, None
        # One row may repeat in hundreds of branches: their sum needs more than bfloat16.
        wide = grad.dtype if grad.dtype.itemsize >= 4 else torch.float32
        shown = grad_packed.index_select(0, gather.shown_packed).to(wide)
        # unsafe: the checks of the offsets would wait for the device
        sums = torch.segment_reduce(
            shown.flatten(1) if shown.ndim > 1 else shown[:, None],
            "sum",
            offsets=gather.shown_ptr,
            axis=0,
            unsafe=True,
        )
        summed = sums.view(-1, *grad.shape[1:]).to(grad.dtype)
        return grad.index_copy_(0, gather.repeated, summed), None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, gather: RowGather) -> torch.Tensor:
        ctx.gather = gather  # type: ignore[attr-defined]
        return x.index_select(0, gather.own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        gather: RowGather = ctx.gather
        num_packed, num_extra = gather.source.shape[0], gather.extra_packed.shape[0]
        if num_packed == grad.shape[0] + num_extra:
            grad_packed = grad.index_select(0, gather.source)
            return grad_packed.index_fill_(0, gather.extra_packed, 0), None
        grad_packed = grad.new_zeros(num_packed, *grad.shape[1:])
        return grad_packed.index_copy_(0, gather.own, grad), None
