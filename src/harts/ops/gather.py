"""From compact rows to a packed layout and back, each the other's exact and ordered backward.

Legend: C compact rows, P packed rows, E packed rows that repeat a compact row, R compact rows
that are repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from harts.errors import HartsError
from harts.views.gather import RowGather


def gather_rows(x: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """Rows of x in the packed layout: packed[p] = x[source[p]], zeros where source[p] is -1.

    x: (C, ...) of any dtype and trailing shape. Returns (P, ...) of the same dtype.
    Backward is the transpose: each compact row reads the gradient of its own packed row, and the
    R repeated ones add those of the E others in packed order, in float32 when x is narrower. The
    same inputs give the same bits. Differentiable once. Raises HartsError when x does not have C
    rows. Time and memory O(P).
    """
    _check_rows("gather_rows", x, gather.own.shape[0], "compact")
    gathered: torch.Tensor = _GatherRows.apply(x, gather)
    return gathered


def own_rows(x: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """The packed rows that are a compact row's own place, in compact order: (P, ...) -> (C, ...).

    Backward gives all other packed rows a zero gradient. Raises HartsError when x does not have
    P rows.
    """
    _check_rows("own_rows", x, gather.source.shape[0], "packed")
    chosen: torch.Tensor = _OwnRows.apply(x, gather)
    return chosen


def _check_rows(name: str, x: torch.Tensor, num_rows: int, kind: str) -> None:
    if x.ndim == 0 or x.shape[0] != num_rows:
        raise HartsError(
            f"{name}: x has shape {tuple(x.shape)}, the gather is over {num_rows} {kind} "
            f"rows; pass one row per {kind} row of the same microbatch"
        )


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
