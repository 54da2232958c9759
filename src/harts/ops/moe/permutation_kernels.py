"""Copies of whole rows to and from the positions of their pairs, in Triton.

A program owns a few compact rows and a block of columns: all its loads (or stores) of a row are
16 bytes a thread and contiguous, and no two programs write the same place.

Legend: C rows, D width, K experts a row.
"""

from __future__ import annotations

from typing import Any

import torch

from harts.ops.needs_triton import tl, triton

ROWS = 4
PAIRS = 512
MAX_COLUMNS = 512
NUM_WARPS = 4


def launch_rows(
    kernel: Any,
    source: torch.Tensor,
    target: torch.Tensor,
    position_of_pair: torch.Tensor,
    num_rows: int,
) -> None:
    """Run either kernel over the compact rows; nothing to do without rows."""
    width = source.shape[1]
    if num_rows == 0 or width == 0:
        return
    columns = min(MAX_COLUMNS, triton.next_power_of_2(width))
    kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(width, columns))](
        source,
        target,
        position_of_pair,
        num_rows,
        D=width,
        K=position_of_pair.shape[0] // num_rows,
        ROWS=ROWS,
        COLUMNS=columns,
        num_warps=NUM_WARPS,
    )


def inverse_and_rows(
    pair_of_position: torch.Tensor, *, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 inverse of an int64 permutation, and the row of each of its pairs, int32 (M,).

    torch's deterministic scatter would sort again for the first.
    """
    num_pairs = pair_of_position.shape[0]
    position_of_pair = torch.empty_like(pair_of_position, dtype=torch.int32)
    row_of_position = torch.empty_like(position_of_pair)
    if num_pairs:
        _inverse_and_rows_kernel[(triton.cdiv(num_pairs, PAIRS),)](
            pair_of_position,
            position_of_pair,
            row_of_position,
            num_pairs,
            K=top_k,
            PAIRS=PAIRS,
            num_warps=NUM_WARPS,
        )
    return position_of_pair, row_of_position


@triton.jit(do_not_specialize=["num_pairs"])
def _inverse_and_rows_kernel(
    pair_of_position,
    position_of_pair,
    row_of_position,
    num_pairs,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
):
    position = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = position < num_pairs
    pair = tl.load(pair_of_position + position, mask=mask, other=0)
    tl.store(position_of_pair + pair, position, mask=mask)
    tl.store(row_of_position + position, (pair // K).to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def spread_kernel(
    source,
    target,
    position_of_pair,
    num_rows,
    D: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """target[position of (c, j)] = source[c]"""
    o_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    o_d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_r = o_r < num_rows
    mask = m_r[:, None] & (o_d < D)[None, :]
    values = tl.load(source + o_r[:, None] * D + o_d[None, :], mask=mask, other=0.0)
    for j in tl.static_range(K):
        position = tl.load(position_of_pair + o_r * K + j, mask=m_r, other=0).to(tl.int64)
        tl.store(target + position[:, None] * D + o_d[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(
    source,
    target,
    position_of_pair,
    num_rows,
    D: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """target[c] = sum over j of source[position of (c, j)]"""
    o_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    o_d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_r = o_r < num_rows
    mask = m_r[:, None] & (o_d < D)[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for j in tl.static_range(K):
        position = tl.load(position_of_pair + o_r * K + j, mask=m_r, other=0).to(tl.int64)
        values = tl.load(source + position[:, None] * D + o_d[None, :], mask=mask, other=0.0)
        total += values.to(tl.float32)
    tl.store(target + o_r[:, None] * D + o_d[None, :], total.to(target.dtype.element_ty), mask=mask)
