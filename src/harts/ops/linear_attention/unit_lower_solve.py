"""Solve with unit lower-triangular matrices, reading below the diagonal only.

Legend: N chunks times heads, B rows of a chunk, W columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable


def unit_lower_solve(lower_NBB: torch.Tensor, right_NBW: torch.Tensor) -> torch.Tensor:
    """x (N, B, W) with (I + lower) x = right; row i of x reads rows up to i of both.

    The gradient of lower is right below its diagonal and left unspecified elsewhere: PyTorch's
    own backward spends half of the operator's time on zeroing it. Differentiable once.
    """
    solution: torch.Tensor = _UnitLowerSolve.apply(lower_NBB, right_NBW)
    return solution


class _UnitLowerSolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, lower: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        # Transposed and from the right, LAPACK reads row-major memory as it lies, without a copy.
        x = torch.linalg.solve_triangular(
            lower.mT, right.mT, upper=True, left=False, unitriangular=True
        ).mT
        ctx.save_for_backward(lower, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lower, x = ctx.saved_tensors
        grad_right = torch.linalg.solve_triangular(
            lower, grad.mT, upper=False, left=False, unitriangular=True
        ).mT
        grad_lower = torch.baddbmm(lower, grad_right, x.mT, beta=0, alpha=-1)
        return grad_lower, grad_right
