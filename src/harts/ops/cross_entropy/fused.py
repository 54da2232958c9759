"""Mapped cross-entropy on CUDA: four matrix products a block, one pass over its logits each way.

Bytes moved for a head row of V logits with bfloat16 weights: forward writes and reads 4 V; backward
writes and reads 4 V again, writes 2 V of gradients and reads them twice, 22 V together. Backward
keeps float32 logits: rounding z to bfloat16 would change p by |z| 2^-9 of itself, which for |z| > 1
is more than rounding the gradient.
Source: section 3.5, Equations 17 and 19.

Legend: C compact rows, D width, V vocabulary, R head rows, P scored positions; of one block: B
head rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.errors import ConfigError
from harts.ops.cross_entropy.fused_kernels import (
    LogitBlock,
    RowStatistics,
    add_rows,
    logit_gradients,
    read_rows,
    read_targets,
    sum_per_row,
)
from harts.views.logprobs import LogProbView

# Every block reads and writes the float32 gradient of the weight once, 8 V D bytes beside a product
# of 2 B V D operations, so blocks are large. At V = 157,184 this budget holds 5,632 rows: with
# cuBLAS's usual tiles of 128 x 256 the gradient of hidden (B, 1536) has 264 tiles, two full waves
# of an H200's 132 multiprocessors. 65,536 rows in blocks of 4 GiB would have 312 tiles and leave
# most of a third wave idle. benchmarks/ops_log_probs.py --sweep measures other budgets.
BLOCK_BYTES = 3377 << 20
_ROW_TILE = 128
# cuBLAS takes its fast kernels for rows that start at multiples of 16 bytes.
_ALIGNMENT = 8


def fused_log_probs(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    view: LogProbView,
    max_block_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_probs (P,), entropy (P,)), float32, in the original order.

    bfloat16 or float32; products take operands of that dtype (float32: torch's setting of tf32)
    and accumulate in float32, d_logits is rounded to it once. Deterministic. The host never waits
    for the device. Memory: float32 logits of at most max_block_bytes, but at least one row; in
    backward their gradient besides, half of that in bfloat16; and the weight's float32 gradient.
    Raises ConfigError for another dtype and for torch before 2.10.
    """
    if hidden_CD.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            "mapped_log_probs: impl 'fused' computes bfloat16 and float32, hidden is "
            f"{hidden_CD.dtype}; use impl='reference'"
        )
    if torch.torch_version.TorchVersion(torch.__version__) < "2.10":
        raise ConfigError(
            f"mapped_log_probs: impl 'fused' needs torch 2.10 or later, got {torch.__version__}: "
            "before, addmm adds no bfloat16 product to a float32 sum"
        )
    with torch.cuda.device_of(hidden_CD):
        log_probs_P, entropy_P = _FusedLogProbs.apply(
            hidden_CD, weight_VD, bias_V, view, max_block_bytes
        )
    return log_probs_P, entropy_P


class _FusedLogProbs(torch.autograd.Function):
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
        statistics = RowStatistics(
            *(hidden_CD.new_empty(view.compact_row.numel(), dtype=torch.float32) for _ in range(3))
        )
        log_probs_P = hidden_CD.new_empty(view.num_positions, dtype=torch.float32)
        entropy_P = torch.empty_like(log_probs_P)
        blocks = _Blocks(view, hidden_CD, weight_VD, bias_V, max_block_bytes)
        for block, _, positions in blocks:
            read_rows(block, statistics)
            read_targets(block, statistics, view, positions, log_probs_P, entropy_P)
        ctx.save_for_backward(
            hidden_CD,
            weight_VD,
            bias_V,
            statistics.largest,
            statistics.log_total,
            statistics.entropy,
        )
        ctx.view, ctx.max_block_bytes = view, max_block_bytes
        return log_probs_P, entropy_P

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_log_probs_P: torch.Tensor | None, d_entropy_P: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_CD, weight_VD, bias_V, *of_rows = ctx.saved_tensors
        statistics, view = RowStatistics(*of_rows), ctx.view
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden_CD = hidden_CD.new_zeros(hidden_CD.shape) if needs_hidden else None
        d_weight_VD = _float32_zeros(weight_VD) if needs_weight else None
        d_bias_V = _float32_zeros(bias_V) if needs_bias else None
        if d_log_probs_P is None:
            d_log_probs_P = statistics.largest.new_zeros(view.num_positions)
        d_sorted_P = d_log_probs_P[view.original]
        d_sum_R = sum_per_row(d_sorted_P, view)
        d_entropy_R = None
        if d_entropy_P is not None:
            d_entropy_R = sum_per_row(d_entropy_P[view.original], view)

        blocks = _Blocks(view, hidden_CD, weight_VD, bias_V, ctx.max_block_bytes)
        gradients_BV = blocks.new_logits(weight_VD.dtype)
        d_rows_BD = hidden_CD.new_empty(blocks.num_rows, hidden_CD.shape[1], dtype=torch.float32)
        for block, hidden_BD, positions in blocks:
            num_rows = len(hidden_BD)
            d_logits_BV = gradients_BV[:num_rows]
            logit_gradients(
                block, statistics, view, positions, d_sorted_P, d_sum_R, d_entropy_R, d_logits_BV
            )
            if d_bias_V is not None:
                d_bias_V += d_logits_BV.sum(dim=0, dtype=torch.float32)
            if d_weight_VD is not None:
                _add_product(d_logits_BV.t(), hidden_BD, out=d_weight_VD)
            if d_hidden_CD is not None:
                _product(d_logits_BV, weight_VD, out=d_rows_BD[:num_rows])
                add_rows(d_rows_BD[:num_rows], view, block.first_row, d_hidden_CD)
        d_weight = None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype)
        d_bias = None if d_bias_V is None else d_bias_V.to(bias_V.dtype)
        return d_hidden_CD, d_weight, d_bias, None, None


class _Blocks:
    """Walks the head rows in blocks of equal size that share one buffer of logits.

    num_rows: of a block, B; the last may be smaller. Yields the block with its logits, its hidden
    rows (B, D) and its sorted positions.
    """

    def __init__(
        self,
        view: LogProbView,
        hidden_CD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        max_block_bytes: int,
    ) -> None:
        self._view, self._hidden_CD, self._weight_VD = view, hidden_CD, weight_VD
        self._bias_V = None if bias_V is None else bias_V.contiguous()
        self._stride = -(-weight_VD.shape[0] // _ALIGNMENT) * _ALIGNMENT
        self.num_rows = rows_of_block(
            view.compact_row.numel(), max_block_bytes // (self._stride * 4)
        )
        temperature = view.temperature
        self._inverse_R = None if temperature is None else temperature.reciprocal().float()

    def new_logits(self, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised block (B, V) whose rows start at aligned places."""
        rows = self._weight_VD.new_empty(self.num_rows, self._stride, dtype=dtype)
        return rows[:, : self._weight_VD.shape[0]]

    def __iter__(self) -> Iterator[tuple[LogitBlock, torch.Tensor, slice]]:
        num_head_rows, row_ptr = self._view.compact_row.numel(), self._view.row_ptr
        buffer_BV = self.new_logits(torch.float32)
        for start in range(0, num_head_rows, max(1, self.num_rows)):
            stop = min(start + self.num_rows, num_head_rows)
            hidden_BD = self._hidden_CD.index_select(0, self._view.compact_row[start:stop])
            logits_BV = buffer_BV[: stop - start]
            _product(hidden_BD, self._weight_VD.t(), out=logits_BV)
            block = LogitBlock(logits_BV, self._bias_V, self._inverse_R, start)
            yield block, hidden_BD, slice(int(row_ptr[start]), int(row_ptr[stop]))


def rows_of_block(num_rows: int, most: int) -> int:
    """Rows of each block when num_rows are cut evenly, at most `most` (but one) a block.

    Rounded up to whole tiles of a matrix product where that still fits.
    """
    most = max(1, most)
    num_blocks = -(-num_rows // most)
    even = -(-num_rows // max(1, num_blocks))
    whole_tiles = -(-even // _ROW_TILE) * _ROW_TILE
    return whole_tiles if whole_tiles <= min(most, num_rows) else even


def _float32_zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=torch.float32, device=like.device)


def _product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
    """out = left @ right in float32; a GPU multiplies bfloat16 and keeps its float32 sums."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def _add_product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
    """out += left @ right in float32, inside the product: no pass and no memory of its own."""
    if left.dtype == out.dtype:
        torch.addmm(out, left, right, out=out)
    else:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
