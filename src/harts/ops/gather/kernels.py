"""Copies and sums of whole rows in Triton: a program owns a few target rows and a block of columns.

Every target element is written by one program, in full, so there is nothing to clear and nothing
to add atomically. Source rows may lie apart (slices of a wider tensor); their columns are adjacent.

Legend: W columns of a row, R rows of a tile, BW columns of a tile.
"""

from __future__ import annotations

import math

import torch

from harts.ops.needs_triton import tl, triton
from harts.views.gather import RowGather

# 8 KB of half precision a program: four loads of 16 bytes a thread.
TILE = 4096
NUM_WARPS = 4
# Rows in flight where a program adds rows one after another.
AHEAD = 4


def copy_rows(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """target[i] = x[source[i]], zeros where source[i] is -1. source: int64, contiguous."""
    rows = _rows_of(x)
    target = x.new_empty(source.shape[0], *x.shape[1:])
    if target.numel():
        _copy_rows_kernel[_grid(target, rows)](
            rows, rows.stride(0), source, target, target.shape[0], **_tile(rows)
        )
    return target


def copy_to_own_rows(x: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """(C, ...) -> (P, ...): each row at its own place, zeros in all other packed rows."""
    rows = _rows_of(x)
    target = x.new_empty(gather.source.shape[0], *x.shape[1:])
    if target.numel():
        _copy_to_own_rows_kernel[_grid(target, rows)](
            rows,
            rows.stride(0),
            gather.source,
            gather.own,
            target,
            target.shape[0],
            **_tile(rows),
        )
    return target


def sum_shown_rows(x: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """(P, ...) -> (C, ...): the sum of the packed rows that show each compact row.

    Nearly every row is shown once, so all are copied from their own place, and the repeated ones
    are then written again: the own place first, then the others ascending, in float32.
    """
    rows = _rows_of(x)
    target = copy_rows(rows, gather.own).view(gather.own.shape[0], *x.shape[1:])
    num_repeated = gather.repeated.shape[0]
    if num_repeated and target.numel():
        columns = _columns(rows.shape[1])
        _sum_rows_kernel[(num_repeated * triton.cdiv(rows.shape[1], columns),)](
            rows,
            rows.stride(0),
            gather.repeated,
            gather.shown_packed,
            gather.shown_ptr,
            target,
            W=rows.shape[1],
            BW=columns,
            AHEAD=AHEAD,
            num_warps=NUM_WARPS,
        )
    return target


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """(rows, W) where they lie; copies only where columns are not adjacent."""
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _columns(width: int) -> int:
    """The widest block that divides the row, so that no thread idles: 512 for 1,536."""
    for columns in (1024, 512, 256, 128):
        if width % columns == 0:
            return columns
    return min(1024, triton.next_power_of_2(width))


def _tile(rows: torch.Tensor) -> dict[str, int]:
    columns = _columns(rows.shape[1])
    return {"W": rows.shape[1], "R": TILE // columns, "BW": columns, "num_warps": NUM_WARPS}


def _grid(target: torch.Tensor, rows: torch.Tensor) -> tuple[int]:
    """One dimension, column blocks of a row next to each other: the others end at 65,535."""
    tile = _tile(rows)
    return (triton.cdiv(target.shape[0], tile["R"]) * triton.cdiv(tile["W"], tile["BW"]),)


@triton.jit
def _place_of_tile(W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr):
    """Rows (R,) in int64 and columns (BW,) of this program."""
    blocks: tl.constexpr = (W + BW - 1) // BW
    row_tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    return row_tile.to(tl.int64) * R + tl.arange(0, R), block * BW + tl.arange(0, BW)


@triton.jit
def _copy_tile(x, x_stride, b_source, shown, target, rows, cols, num_rows, W: tl.constexpr):
    """target[rows] = x[b_source] where shown, else zeros."""
    in_row = (cols < W)[None, :]
    values = tl.load(
        x + b_source[:, None] * x_stride + cols[None, :],
        mask=shown[:, None] & in_row,
        other=0.0,
    )
    at = rows[:, None] * W + cols[None, :]
    tl.store(target + at, values, mask=(rows < num_rows)[:, None] & in_row)


@triton.jit(do_not_specialize=["num_rows"])
def _copy_rows_kernel(
    x,
    x_stride,
    source,
    target,
    num_rows,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
):
    rows, cols = _place_of_tile(W, R, BW)
    b_source = tl.load(source + rows, mask=rows < num_rows, other=-1)
    _copy_tile(x, x_stride, b_source, b_source >= 0, target, rows, cols, num_rows, W)


@triton.jit(do_not_specialize=["num_rows"])
def _copy_to_own_rows_kernel(
    x,
    x_stride,
    source,
    own,
    target,
    num_rows,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
):
    rows, cols = _place_of_tile(W, R, BW)
    b_source = tl.load(source + rows, mask=rows < num_rows, other=-1)
    b_own = tl.load(own + b_source, mask=b_source >= 0, other=-1)
    _copy_tile(x, x_stride, b_source, b_own == rows, target, rows, cols, num_rows, W)


@triton.jit
def _sum_rows_kernel(
    x,
    x_stride,
    target_row,
    shown_row,
    shown_ptr,
    target,
    W: tl.constexpr,
    BW: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """target[target_row[i]] = sum of x[shown_row[j]] over shown_ptr[i] <= j < shown_ptr[i + 1]."""
    blocks: tl.constexpr = (W + BW - 1) // BW
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    cols = block * BW + tl.arange(0, BW)
    in_row = cols < W
    stop = tl.load(shown_ptr + row + 1)
    b_sum = tl.zeros([BW], dtype=tl.float32)
    for first in range(tl.load(shown_ptr + row), stop, AHEAD):
        # Loads of several rows wait together; past the end they add zeros, which moves no bit.
        for ahead in tl.static_range(AHEAD):
            inside = first + ahead < stop
            shown = tl.load(shown_row + first + ahead, mask=inside, other=0)
            values = tl.load(x + shown * x_stride + cols, mask=in_row & inside, other=0.0)
            b_sum += values.to(tl.float32)
    at = tl.load(target_row + row) * W + cols
    tl.store(target + at, b_sum.to(target.dtype.element_ty), mask=in_row)
