"""From compact rows to a packed layout and back, each the other's exact and ordered backward.

Legend: C compact rows, P packed rows, R compact rows that are repeated.
"""

from __future__ import annotations

import torch

from harts.errors import HartsError
from harts.ops.fused_checks import Implementation, runs_fused
from harts.ops.gather.reference import gather_rows_reference, own_rows_reference
from harts.views.gather import RowGather


def gather_rows(
    x: torch.Tensor, gather: RowGather, *, impl: Implementation = "reference"
) -> torch.Tensor:
    """Rows of x in the packed layout: packed[p] = x[source[p]], zeros where source[p] is -1.

    x: (C, ...) of any trailing shape. Returns (P, ...) of the same dtype.
    Backward is the transpose: each compact row reads the gradient of its own packed row, and the
    R repeated ones add those of the others in packed order, in float32 when x is narrower, and
    round once. The same inputs give the same bits. Differentiable once. Time and memory O(P).

    "reference" is plain PyTorch on any device, in any dtype. "fused" needs CUDA and Triton and
    gives the same bits: one kernel forward (reads x, writes packed), one backward and a second one
    over the repeated rows alone. Rows that lie apart are read where they lie.

    Raises ConfigError for an unknown impl and where it cannot run, HartsError when x does not have
    C rows and for a dtype that the kernels do not compute.
    """
    _check_rows("gather_rows", x, gather.own.shape[0], "compact")
    if not runs_fused("gather_rows", impl, x):
        return gather_rows_reference(x, gather)
    from harts.ops.gather.fused import gather_rows_fused

    return gather_rows_fused(x, gather)


def own_rows(
    x: torch.Tensor, gather: RowGather, *, impl: Implementation = "reference"
) -> torch.Tensor:
    """The packed rows that are a compact row's own place, in compact order: (P, ...) -> (C, ...).

    Backward gives all other packed rows a zero gradient. impl and errors as in `gather_rows`, for
    P rows; fused, one kernel forward and one backward.
    """
    _check_rows("own_rows", x, gather.source.shape[0], "packed")
    if not runs_fused("own_rows", impl, x):
        return own_rows_reference(x, gather)
    from harts.ops.gather.fused import own_rows_fused

    return own_rows_fused(x, gather)


def _check_rows(name: str, x: torch.Tensor, num_rows: int, kind: str) -> None:
    if x.ndim == 0 or x.shape[0] != num_rows:
        raise HartsError(
            f"{name}: x has shape {tuple(x.shape)}, the gather is over {num_rows} {kind} "
            f"rows; pass one row per {kind} row of the same microbatch"
        )
