"""From compact rows to a packed layout, with a backward that is exact and ordered.

Legend: C compact rows, P packed rows, E packed rows that repeat a compact row.
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
    Backward is the transpose: each compact row reads the gradient of its own packed row, then
    the E repeated rows are added in packed order, in float32 when x is narrower. The same inputs
    give the same bits on CPU, on CUDA only under torch.use_deterministic_algorithms.
    Differentiable once. Raises HartsError when x does not have C rows. Time and memory O(P).
    """
    num_compact = gather.own.shape[0]
    if x.ndim == 0 or x.shape[0] != num_compact:
        raise HartsError(
            f"gather_rows: x has shape {tuple(x.shape)}, the gather is over {num_compact} compact "
            "rows; pass one row per compact row of the same microbatch"
        )
    gathered: torch.Tensor = _GatherRows.apply(x, gather)
    return gathered


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
        if gather.extra_packed.shape[0] == 0:
            return grad, None
        # One row may repeat in hundreds of branches: their sum needs more than bfloat16.
        wide = grad.dtype if grad.dtype.itemsize >= 4 else torch.float32
        repeated = grad_packed.index_select(0, gather.extra_packed).to(wide)
        total = grad.to(wide).index_add_(0, gather.extra_compact, repeated)
        return total.to(grad.dtype), None
