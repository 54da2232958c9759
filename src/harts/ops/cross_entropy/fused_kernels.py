"""Passes over one block's logits, in Triton: statistics, targets, gradients.

Nothing is added by atomics and every sum has a fixed order, so the bits repeat. No launch constant
depends on the number of rows or positions, so nothing is compiled again from step to step.

Legend: C compact rows, D width, V vocabulary, R head rows, P scored positions; of one block: B
head rows. Logits are float32 (B, V) with a row stride; "scaled" logits have the bias added and
are divided by the row's temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harts.ops.needs_triton import tl, triton
from harts.views.logprobs import LogProbView

# Columns or places of one program and its warps: 16 bytes a thread and load, two to four loads in
# flight, and registers for at least four programs on a multiprocessor.
_ROW_BLOCK, _ROW_WARPS = 2048, 8
_GRADIENT_BLOCK, _GRADIENT_WARPS = 4096, 8
_WIDTH_BLOCK, _WIDTH_WARPS = 512, 4
_POSITION_BLOCK, _POSITION_WARPS = 128, 4
_SUM_BLOCK, _SUM_WARPS = 32, 1

# Stands for minus infinity in running maxima: differences of two stay finite.
_NEGLIGIBLE = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class RowStatistics:
    """Softmax of every head row (R,), float32: maximum, log of the sum above it, entropy.

    The log-sum-exp is largest + log_total. They stay apart: added up, a log-probability near zero
    would carry the rounding of a sum that may be large.
    """

    largest: torch.Tensor
    log_total: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class LogitBlock:
    """Logits of head rows [first_row, first_row + B), and what scales them.

    logits: float32 (B, V), rows contiguous. bias: (V,), contiguous, or None. inverse_temperature:
    float32 (R,), of all head rows, or None where all are 1.
    """

    logits: torch.Tensor
    bias: torch.Tensor | None
    inverse_temperature: torch.Tensor | None
    first_row: int

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pointers for a kernel; an absent one is any pointer, and never read."""
        absent = self.logits
        return (
            self.logits,
            absent if self.bias is None else self.bias,
            absent if self.inverse_temperature is None else self.inverse_temperature,
        )

    @property
    def constants(self) -> dict[str, int | bool]:
        """Launch constants: of the model and the data's kind, never of their size."""
        return {
            "STRIDE": self.logits.stride(0),
            "HAS_BIAS": self.bias is not None,
            "HAS_TEMPERATURE": self.inverse_temperature is not None,
        }


def read_rows(block: LogitBlock, statistics: RowStatistics) -> None:
    """Fill the block's part of the statistics: one read of the logits, 4 B V bytes."""
    num_rows, vocabulary = block.logits.shape
    _read_rows_kernel[(num_rows,)](
        *block.operands,
        statistics.largest,
        statistics.log_total,
        statistics.entropy,
        block.first_row,
        V=vocabulary,
        BLOCK=_ROW_BLOCK,
        **block.constants,
        num_warps=_ROW_WARPS,
    )


def read_targets(
    block: LogitBlock,
    statistics: RowStatistics,
    view: LogProbView,
    positions: slice,
    log_probs_P: torch.Tensor,
    entropy_P: torch.Tensor,
) -> None:
    """Log-probability and entropy of the sorted positions, written in the original order."""
    grid = (triton.cdiv(positions.stop - positions.start, _POSITION_BLOCK),)
    _read_targets_kernel[grid](
        *block.operands,
        statistics.largest,
        statistics.log_total,
        statistics.entropy,
        view.target,
        view.head_row,
        view.original,
        log_probs_P,
        entropy_P,
        block.first_row,
        positions.start,
        positions.stop,
        BLOCK=_POSITION_BLOCK,
        **block.constants,
        num_warps=_POSITION_WARPS,
        # A scaled logit that stays unrounded could exceed the rounded maximum: no log-prob above 0.
        enable_fp_fusion=False,
    )


def sum_per_row(sorted_P: torch.Tensor, view: LogProbView) -> torch.Tensor:
    """Sums of the values of each head row's positions (R,), float32; sorted_P is contiguous."""
    sums_R = sorted_P.new_empty(view.compact_row.numel())
    if sums_R.numel():
        _sum_per_row_kernel[(sums_R.numel(),)](
            sorted_P, view.position_ptr, sums_R, BLOCK=_SUM_BLOCK, num_warps=_SUM_WARPS
        )
    return sums_R


def logit_gradients(
    block: LogitBlock,
    statistics: RowStatistics,
    view: LogProbView,
    positions: slice,
    d_sorted_P: torch.Tensor,
    d_sum_R: torch.Tensor,
    d_entropy_R: torch.Tensor | None,
    d_logits_BV: torch.Tensor,
) -> None:
    """Gradients of the unscaled logits, rounded once, into d_logits_BV (the logits' row stride).

    Reads 4 B V bytes and writes d_logits_BV. The entries that a position targets are then written
    again with their positions' gradients d_sorted_P added in float32.
    """
    num_rows, vocabulary = block.logits.shape
    slopes = (
        statistics.largest,
        statistics.log_total,
        statistics.entropy,
        d_sum_R,
        d_sum_R if d_entropy_R is None else d_entropy_R,
    )
    constants = block.constants | {"HAS_ENTROPY": d_entropy_R is not None}
    _softmax_gradients_kernel[(num_rows * triton.cdiv(vocabulary, _GRADIENT_BLOCK),)](
        *block.operands,
        *slopes,
        d_logits_BV,
        block.first_row,
        V=vocabulary,
        BLOCK=_GRADIENT_BLOCK,
        **constants,
        num_warps=_GRADIENT_WARPS,
    )
    _target_gradients_kernel[(triton.cdiv(positions.stop - positions.start, _POSITION_BLOCK),)](
        *block.operands,
        *slopes,
        d_sorted_P,
        view.target,
        view.head_row,
        view.position_ptr,
        d_logits_BV,
        block.first_row,
        positions.start,
        positions.stop,
        BLOCK=_POSITION_BLOCK,
        **constants,
        num_warps=_POSITION_WARPS,
    )


def add_rows(
    values_BD: torch.Tensor, view: LogProbView, first_row: int, total_CD: torch.Tensor
) -> None:
    """total_CD[compact row] += values_BD (float32), rounded once a block and compact row.

    The head rows of a compact row (one for each temperature) are adjacent: the first of them in
    the block adds up all, in order.
    """
    num_rows, width = values_BD.shape
    _add_rows_kernel[(num_rows, triton.cdiv(width, _WIDTH_BLOCK))](
        values_BD,
        view.compact_row,
        total_CD,
        first_row,
        num_rows,
        D=width,
        BLOCK=_WIDTH_BLOCK,
        num_warps=_WIDTH_WARPS,
    )


@triton.jit
def _scale_of(inverse_temperature, head_row, mask, HAS_TEMPERATURE: tl.constexpr):
    """1 / temperature of a head row, or of several."""
    if HAS_TEMPERATURE:
        scale = tl.load(inverse_temperature + head_row, mask=mask, other=1.0)
    else:
        scale = tl.full([], 1.0, dtype=tl.float32)
    return scale


@triton.jit
def _scaled_logits(logits, bias, places, columns, scale, mask, HAS_BIAS: tl.constexpr):
    x = tl.load(logits + places, mask=mask, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    return x * scale


@triton.jit
def _softmax_gradient(log_p, d_sum, d_entropy, entropy, HAS_ENTROPY: tl.constexpr):
    """-(sum g) p - (sum g_entropy) p (log p + entropy), of scaled logits."""
    slope = -d_sum
    if HAS_ENTROPY:
        slope = slope - d_entropy * (log_p + entropy)
    return slope * tl.exp(log_p)


@triton.jit(do_not_specialize=["first_row"])
def _read_rows_kernel(
    logits,
    bias,
    inverse_temperature,
    largest,
    log_total,
    entropy,
    first_row,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Online softmax, one row a program: m = max z, s = sum e^(z-m), t = sum e^(z-m) (z-m).

    Every lane keeps its own m, s and t until the row ends: no exchange between threads inside the
    loop. Two columns a lane share one rescaling.
    """
    row = tl.program_id(0)
    head_row = first_row + row
    scale = _scale_of(inverse_temperature, head_row, True, HAS_TEMPERATURE)
    logits += row.to(tl.int64) * STRIDE
    lanes = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], _NEGLIGIBLE, dtype=tl.float32)
    s = tl.zeros([BLOCK], dtype=tl.float32)
    t = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, 2 * BLOCK):
        near = start + lanes
        far = near + BLOCK
        x_near = _scaled_logits(logits, bias, near, near, scale, near < V, HAS_BIAS)
        x_far = _scaled_logits(logits, bias, far, far, scale, far < V, HAS_BIAS)
        x_near = tl.where(near < V, x_near, _NEGLIGIBLE)
        x_far = tl.where(far < V, x_far, _NEGLIGIBLE)
        above = tl.maximum(m, tl.maximum(x_near, x_far))
        shift = m - above
        keep = tl.exp(shift)
        x_near -= above
        x_far -= above
        e_near = tl.exp(x_near)
        e_far = tl.exp(x_far)
        t = keep * (t + s * shift) + e_near * x_near + e_far * x_far
        s = keep * s + e_near + e_far
        m = above
    highest = tl.max(m, axis=0)
    shift = m - highest
    keep = tl.exp(shift)
    total = tl.sum(keep * s, axis=0)
    moment = tl.sum(keep * (t + s * shift), axis=0)
    log_of_total = tl.log(total)
    tl.store(largest + head_row, highest)
    tl.store(log_total + head_row, log_of_total)
    tl.store(entropy + head_row, log_of_total - moment / total)


@triton.jit(do_not_specialize=["first_row", "begin", "stop"])
def _read_targets_kernel(
    logits,
    bias,
    inverse_temperature,
    largest,
    log_total,
    entropy,
    target,
    head_row,
    original,
    log_probs,
    entropy_of_position,
    first_row,
    begin,
    stop,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    place = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < stop
    row = tl.load(head_row + place, mask=inside, other=0)
    column = tl.load(target + place, mask=inside, other=0)
    scale = _scale_of(inverse_temperature, row, inside, HAS_TEMPERATURE)
    at = (row - first_row) * STRIDE + column
    x = _scaled_logits(logits, bias, at, column, scale, inside, HAS_BIAS)
    x -= tl.load(largest + row, mask=inside, other=0.0)
    x -= tl.load(log_total + row, mask=inside, other=0.0)
    out = tl.load(original + place, mask=inside, other=0)
    tl.store(log_probs + out, x, mask=inside)
    b_entropy = tl.load(entropy + row, mask=inside, other=0.0)
    tl.store(entropy_of_position + out, b_entropy, mask=inside)


@triton.jit
def _sum_per_row_kernel(values, position_ptr, sums, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    begin = tl.load(position_ptr + row)
    stop = tl.load(position_ptr + row + 1)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(begin, stop, BLOCK):
        place = start + lanes
        total += tl.load(values + place, mask=place < stop, other=0.0)
    tl.store(sums + row, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["first_row"])
def _softmax_gradients_kernel(
    logits,
    bias,
    inverse_temperature,
    largest,
    log_total,
    entropy,
    d_sum,
    d_entropy,
    d_logits,
    first_row,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """A program owns one row and one block of columns."""
    num_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = program // num_blocks
    column = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    head_row = first_row + row
    scale = _scale_of(inverse_temperature, head_row, True, HAS_TEMPERATURE)
    row_begin = row.to(tl.int64) * STRIDE
    x = _scaled_logits(logits + row_begin, bias, column, column, scale, inside, HAS_BIAS)
    log_p = x - tl.load(largest + head_row) - tl.load(log_total + head_row)
    gradient = _softmax_gradient(
        log_p,
        tl.load(d_sum + head_row),
        tl.load(d_entropy + head_row),
        tl.load(entropy + head_row),
        HAS_ENTROPY,
    )
    gradient = (gradient * scale).to(d_logits.dtype.element_ty)
    tl.store(d_logits + row_begin + column, gradient, mask=inside)


@triton.jit(do_not_specialize=["first_row", "begin", "stop"])
def _target_gradients_kernel(
    logits,
    bias,
    inverse_temperature,
    largest,
    log_total,
    entropy,
    d_sum,
    d_entropy,
    d_sorted,
    target,
    head_row,
    position_ptr,
    d_logits,
    first_row,
    begin,
    stop,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """A lane owns one position and the entry that it targets.

    It walks all positions of its row in order and adds the gradients of those with its target.
    Positions that share an entry find the same sum and store the same bits.
    """
    place = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < stop
    row = tl.load(head_row + place, mask=inside, other=0)
    column = tl.load(target + place, mask=inside, other=0)
    first = tl.load(position_ptr + row, mask=inside, other=0)
    last = tl.load(position_ptr + row + 1, mask=inside, other=0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(tl.max(last - first, axis=0)):
        other = first + step
        listed = other < last
        same = tl.load(target + other, mask=listed, other=-1) == column
        total += tl.load(d_sorted + other, mask=listed & same, other=0.0)
    scale = _scale_of(inverse_temperature, row, inside, HAS_TEMPERATURE)
    at = (row - first_row) * STRIDE + column
    x = _scaled_logits(logits, bias, at, column, scale, inside, HAS_BIAS)
    x -= tl.load(largest + row, mask=inside, other=0.0)
    x -= tl.load(log_total + row, mask=inside, other=0.0)
    gradient = _softmax_gradient(
        x,
        tl.load(d_sum + row, mask=inside, other=0.0),
        tl.load(d_entropy + row, mask=inside, other=0.0),
        tl.load(entropy + row, mask=inside, other=0.0),
        HAS_ENTROPY,
    )
    gradient = ((gradient + total) * scale).to(d_logits.dtype.element_ty)
    tl.store(d_logits + at, gradient, mask=inside)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _add_rows_kernel(
    values, compact_row, totals, first_row, num_rows, D: tl.constexpr, BLOCK: tl.constexpr
):
    """A program owns one head row's part of the width; those that repeat a compact row do nothing.

    A compact row that began in the block before continues its sum.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = first_row + row
    own = tl.load(compact_row + place)
    repeats = tl.load(compact_row + place - 1, mask=place > 0, other=-1) == own
    begins = (row == 0) | (repeats == 0)
    inside = (column < D) & begins
    at = own * D + column
    total = tl.load(totals + at, mask=inside & repeats, other=0.0).to(tl.float32)
    going = begins
    while going:
        total += tl.load(values + row.to(tl.int64) * D + column, mask=inside, other=0.0)
        row += 1
        following = tl.load(compact_row + first_row + row, mask=row < num_rows, other=-1)
        going = following == own
    tl.store(totals + at, total.to(totals.dtype.element_ty), mask=inside)
