"""The gathers as one kernel a pass. Import it where it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.ops.gather import kernels
from harts.views.gather import RowGather


def gather_rows_fused(x: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """See `harts.ops.gather.gather_rows`."""
    packed: torch.Tensor = _GatherRows.apply(x, gather)  # type: ignore[no-untyped-call]
    return packed


def own_rows_fused(x: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """See `harts.ops.gather.own_rows`."""
    chosen: torch.Tensor = _OwnRows.apply(x, gather)  # type: ignore[no-untyped-call]
    return chosen


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: RowGather) -> torch.Tensor:
        ctx.gather = gather
        with torch.cuda.device_of(x):
            return kernels.copy_rows(x, gather.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_packed: torch.Tensor) -> tuple[torch.Tensor, None]:
        return kernels.sum_shown_rows(grad_packed, ctx.gather), None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gather: RowGather) -> torch.Tensor:
        ctx.gather = gather
        with torch.cuda.device_of(x):
            return kernels.copy_rows(x, gather.own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return kernels.copy_to_own_rows(grad, ctx.gather), None
