"""The recurrence over chunk boundaries of a forest, one batched step per chunk depth.

End state of a chunk = transition @ start state + update (paper Equation 16: the boundary states
that a plan requests come from this one scan, there is no second one).

Legend: Z zero state, X external states, Q chunks in level order, G heads, K key, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from harts.views.linear import LinearView


def state_scan(
    transition_QGKK: torch.Tensor,
    update_QGKV: torch.Tensor,
    external_XGKV: torch.Tensor,
    view: LinearView,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Start state of every chunk (Q, G, K, V), and the produced slots (num_produced, G, K, V).

    A chunk starts from the zero state, an external state or the end of a chunk of an earlier
    level, as view.start_state says; all of one floating dtype. Backward walks the levels in
    reverse and adds to each producer the gradients of its consumers in a fixed order.
    Two kernel calls a level in either direction. Differentiable once.
    """
    start, produced = _StateScan.apply(transition_QGKK, update_QGKV, external_XGKV, view)
    return start, produced


class _StateScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        transition: torch.Tensor,
        update: torch.Tensor,
        external: torch.Tensor,
        view: LinearView,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_given = 1 + external.shape[0]
        pool = update.new_empty(num_given + update.shape[0], *update.shape[1:])
        pool[0] = 0.0
        pool[1:num_given] = external
        start = torch.empty_like(update)
        levels = zip(
            _split(view.start_state, view.level_ptr),
            _split(start.flatten(1), view.level_ptr),
            _split_heads(start, view.level_ptr),
            _split_heads(transition, view.level_ptr),
            _split_heads(update, view.level_ptr),
            _split_heads(pool[num_given:], view.level_ptr),
            strict=True,
        )
        pool_rows = pool.flatten(1)
        for source, start_rows, start_l, transition_l, update_l, end_l in levels:
            torch.index_select(pool_rows, 0, source, out=start_rows)
            torch.baddbmm(update_l, transition_l, start_l, out=end_l)
        ctx.save_for_backward(transition, start)
        ctx.view, ctx.num_given = view, num_given  # type: ignore[attr-defined]
        return start, pool.index_select(0, view.produced_state)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_start: torch.Tensor, grad_produced: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        transition, start = ctx.saved_tensors
        view: LinearView = ctx.view
        grad_pool = start.new_zeros(ctx.num_given + start.shape[0], *start.shape[1:])
        grad_rows = grad_pool.flatten(1)
        grad_rows.index_add_(0, view.produced_state, grad_produced.flatten(1))
        grad_end = grad_pool[ctx.num_given :]
        grad_start = grad_start.contiguous()
        total = torch.empty_like(grad_start)
        levels = zip(
            _split(view.start_state, view.level_ptr),
            _split(total.flatten(1), view.level_ptr),
            _split_heads(total, view.level_ptr),
            _split_heads(grad_start, view.level_ptr),
            _split_heads(transition.mT, view.level_ptr),
            _split_heads(grad_end, view.level_ptr),
            strict=True,
        )
        for source, total_rows, total_l, grad_l, transposed_l, end_l in reversed(list(levels)):
            torch.baddbmm(grad_l, transposed_l, end_l, out=total_l)
            grad_rows.index_add_(0, source, total_rows)
        return grad_end @ start.mT, grad_end, grad_pool[1 : ctx.num_given], None


def _split(x: torch.Tensor, level_ptr: Sequence[int]) -> tuple[torch.Tensor, ...]:
    sizes = [stop - start for start, stop in pairwise(level_ptr)]
    return x.split(sizes)


def _split_heads(x: torch.Tensor, level_ptr: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Views (chunks of the level * G, .., ..) of (Q, G, .., ..)."""
    return _split(x.flatten(0, 1), [pointer * x.shape[1] for pointer in level_ptr])
