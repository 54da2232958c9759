"""Mapped cross-entropy in row blocks: one softmax a head row, one target read a scored position.

Forward keeps a log-sum-exp and an entropy per head row; backward recomputes each block's logits z
and forms dz = scatter(g at target) - (sum g) p - (sum g_entropy) p (log p + entropy).
Source: section 3.5, Equations 17 and 19.

Legend: C compact rows, D width, V vocabulary, R head rows, P scored positions; of one block:
B head rows, S scored positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.views.logprobs import LogProbView


class MappedLogProbs(torch.autograd.Function):
    """(log_probs (P,), entropy (P,)) of (hidden (C, D), weight (V, D), bias (V,) or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_CD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        view: LogProbView,
        max_block_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        dtype = torch.float32 if hidden_CD.dtype.itemsize < 4 else hidden_CD.dtype
        log_sum_exp_R = hidden_CD.new_empty(view.compact_row.numel(), dtype=dtype)
        entropy_R = torch.empty_like(log_sum_exp_R)
        sorted_P = hidden_CD.new_empty(view.num_positions, dtype=dtype)
        for block in _blocks(view, weight_VD.shape[0], dtype, max_block_bytes):
            log_sum_exp_R[block.rows], entropy_R[block.rows], sorted_P[block.positions] = (
                _read_block(_logits(hidden_CD, weight_VD, bias_V, block), block)
            )
        ctx.save_for_backward(hidden_CD, weight_VD, bias_V, log_sum_exp_R, entropy_R)
        ctx.view, ctx.max_block_bytes = view, max_block_bytes
        log_probs_P, entropy_P = torch.empty_like(sorted_P), torch.empty_like(sorted_P)
        log_probs_P[view.original] = sorted_P
        entropy_P[view.original] = entropy_R[view.head_row]
        return log_probs_P, entropy_P

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_log_probs_P: torch.Tensor | None, d_entropy_P: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_CD, weight_VD, bias_V, log_sum_exp_R, entropy_R = ctx.saved_tensors
        view: LogProbView = ctx.view
        dtype = log_sum_exp_R.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden_CD = torch.zeros_like(hidden_CD) if needs_hidden else None
        d_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=dtype) if needs_bias else None
        if d_log_probs_P is None:
            d_log_probs_P = log_sum_exp_R.new_zeros(view.num_positions)
        d_sorted_P = d_log_probs_P[view.original]
        d_sum_R = _sum_per_row(d_sorted_P, view)
        d_entropy_R = None
        if d_entropy_P is not None:
            d_entropy_R = _sum_per_row(d_entropy_P[view.original], view)
        for block in _blocks(view, weight_VD.shape[0], dtype, ctx.max_block_bytes):
            rows = block.rows
            d_logits_BV = _softmax_gradient(
                _logits(hidden_CD, weight_VD, bias_V, block).sub_(log_sum_exp_R[rows, None]),
                d_sum_R[rows, None],
                entropy_R[rows, None],
                None if d_entropy_R is None else d_entropy_R[rows, None],
            )
            place = block.row_of_position * d_logits_BV.shape[1] + block.target
            _add_in_order(d_logits_BV.view(-1), place, d_sorted_P[block.positions])
            if block.temperature is not None:
                d_logits_BV.div_(block.temperature)
            if d_bias_V is not None:
                d_bias_V += d_logits_BV.sum(dim=0)
            if d_weight_VD is not None:
                _add_matmul(d_weight_VD, d_logits_BV.t(), hidden_CD[block.compact_row])
            if d_hidden_CD is not None:
                _add_rows(d_hidden_CD, _mm(d_logits_BV, weight_VD), block)
            del d_logits_BV  # or it would live on while the next block's logits are made
        d_weight = None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype)
        d_bias = None if d_bias_V is None else d_bias_V.to(bias_V.dtype)
        return d_hidden_CD, d_weight, d_bias, None, None


@dataclass(frozen=True)
class _Block:
    """Head rows whose logits exist together, and the scored positions that read them.

    rows: of all head rows. compact_row: (B,). temperature: (B, 1) in the logits' dtype, None if 1.
    positions: in sorted order. row_of_position: (S,), row of the block. target: (S,).
    """

    rows: slice
    compact_row: torch.Tensor
    temperature: torch.Tensor | None
    positions: slice
    row_of_position: torch.Tensor
    target: torch.Tensor


def _blocks(
    view: LogProbView, vocabulary: int, dtype: torch.dtype, max_block_bytes: int
) -> Iterator[_Block]:
    num_head_rows = view.compact_row.numel()
    block_rows = max(1, max_block_bytes // (vocabulary * dtype.itemsize))
    for start in range(0, num_head_rows, block_rows):
        rows = slice(start, min(num_head_rows, start + block_rows))
        positions = slice(int(view.row_ptr[rows.start]), int(view.row_ptr[rows.stop]))
        temperature = view.temperature
        yield _Block(
            rows=rows,
            compact_row=view.compact_row[rows],
            temperature=None if temperature is None else temperature[rows, None].to(dtype),
            positions=positions,
            row_of_position=view.head_row[positions] - rows.start,
            target=view.target[positions],
        )


def _logits(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, block: _Block
) -> torch.Tensor:
    """(B, V) logits over temperature, float32 or float64."""
    logits_BV = _mm(hidden_CD[block.compact_row], weight_VD.t())
    if bias_V is not None:
        logits_BV.add_(bias_V)
    if block.temperature is not None:
        logits_BV.div_(block.temperature)
    return logits_BV


def _read_block(
    logits_BV: torch.Tensor, block: _Block
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-sum-exp (B,), entropy (B,) and log-probabilities (S,). Overwrites the logits."""
    largest = logits_BV.amax(dim=-1, keepdim=True)
    weights_BV = logits_BV.sub_(largest).exp()
    total = weights_BV.sum(dim=-1)
    log_total = total.log()
    log_probs_S = logits_BV[block.row_of_position, block.target] - log_total[block.row_of_position]
    entropy = log_total - weights_BV.mul_(logits_BV).sum(dim=-1) / total
    return largest.squeeze(-1) + log_total, entropy, log_probs_S


def _softmax_gradient(
    log_softmax_BV: torch.Tensor,
    d_sum_B1: torch.Tensor,
    entropy_B1: torch.Tensor,
    d_entropy_B1: torch.Tensor | None,
) -> torch.Tensor:
    """-(sum g) p - (sum g_entropy) p (log p + entropy). Overwrites log_softmax_BV.

    The entropy term costs a second block and three passes, only where entropy has a gradient.
    """
    if d_entropy_B1 is None:
        return log_softmax_BV.exp_().mul_(-d_sum_B1)
    probability_BV = log_softmax_BV.exp()
    slope_BV = log_softmax_BV.add_(entropy_B1).mul_(-d_entropy_B1).sub_(d_sum_B1)
    return slope_BV.mul_(probability_BV)


def _sum_per_row(values_P: torch.Tensor, view: LogProbView) -> torch.Tensor:
    sums_R = values_P.new_zeros(view.compact_row.numel())
    _add_in_order(sums_R, view.head_row, values_P)
    return sums_R


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right with float32 (or float64) products and sums.

    CUDA multiplies in right's low precision and keeps its float32 sums; a CPU has no such kernel.
    """
    if right.dtype.itemsize >= 4:
        return left @ right
    if right.is_cuda:
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, without a product on the side where the dtypes allow it."""
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += _mm(left, right)


def _add_in_order(total: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
    """total[place] += values in one dimension; repeated places give the same bits every time.

    Each device has one such call: on a CPU 1-D index_add_ is a plain loop while index_put_ adds
    with threads, on CUDA index_put_ sorts while index_add_ uses atomics.
    """
    if total.is_cuda:
        total.index_put_((place,), values, accumulate=True)
    else:
        total.index_add_(0, place, values)


def _add_rows(total_CD: torch.Tensor, values_BD: torch.Tensor, block: _Block) -> None:
    """total[compact_row] += values; where a row repeats (temperatures) its values take turns."""
    row, values_BD = block.compact_row, values_BD.to(total_CD.dtype)
    if block.temperature is None:
        total_CD[row] = values_BD
        return
    while row.numel() > 0:
        first = torch.ones_like(row, dtype=torch.bool)
        first[1:] = row[1:] != row[:-1]
        total_CD[row[first]] += values_BD[first]
        row, values_BD = row[~first], values_BD[~first]
