"""Causal convolution over packed rows: every row with its true ancestors.

Legend: P packed rows, W width of the kernel, R rows read across chains, E such reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harts.views.chains import Chain, Ints
from harts.views.gather import RowGather, build_row_gather, on_device
from harts.views.packing import ChainPacking


@dataclass(frozen=True)
class ConvView:
    """What each packed row of the linear-attention layers reads: its W - 1 ancestors and itself.

    An ancestor before the chain's first packed row is read at its own place in another chain; it
    may span several segments and is never the packed neighbour. Before the root there is -1, zero.

    window: int32 (P, W), packed rows that row p reads, ascending in depth, itself last.
    branch_rows: int32 (R,), the rows that are also read from elsewhere than a single sequence
    would have it, which is at window[r + i, W - 1 - i] for i < W. branch_ptr: int32 (R+1,) and
    branch_reads: int32 (E,), the places p * W + tap of those other reads for each, ascending.
    extended: the chains with W - 1 context rows in front, gathered from packed rows;
    extended.own[p] is the extended row of packed row p, whose window ends there.
    """

    width: int
    window: torch.Tensor
    branch_rows: torch.Tensor
    branch_ptr: torch.Tensor
    branch_reads: torch.Tensor
    extended: RowGather


def build_conv_view(
    packing: ChainPacking, chains: list[Chain], width: int, device: torch.device
) -> ConvView:
    """Extend every chain by its context, in packed order. O(P width)."""
    context_rows = width - 1
    own = np.empty(int(packing.source.max()) + 1, np.int64)
    own[packing.source[packing.is_own]] = np.flatnonzero(packing.is_own)
    pieces, is_own = [], []
    for place, index in enumerate(packing.by_round.tolist()):
        anchor = int(packing.anchor[place])
        first = max(0, anchor - context_rows)
        context = own[chains[index].ancestors_from(first)[: anchor - first]]
        begin, stop = packing.cu_seqlens[place], packing.cu_seqlens[place + 1]
        pieces += [np.full(context_rows - len(context), -1), context, np.arange(begin, stop)]
        is_own.append(np.repeat([False, True], [context_rows, stop - begin]))
    source, own_place = np.concatenate(pieces).astype(np.int64), np.concatenate(is_own)
    window = source[np.flatnonzero(own_place)[:, None] + np.arange(-context_rows, 1)]
    branch_rows, branch_ptr, branch_reads = _reads_across_chains(window)
    return ConvView(
        width=width,
        window=on_device(window.astype(np.int32), device),
        branch_rows=on_device(branch_rows.astype(np.int32), device),
        branch_ptr=on_device(branch_ptr.astype(np.int32), device),
        branch_reads=on_device(branch_reads.astype(np.int32), device),
        extended=build_row_gather(source, own_place, device),
    )


def _reads_across_chains(window: Ints) -> tuple[Ints, Ints, Ints]:
    """Rows read in other chains, and the CSR of those reads p * W + tap."""
    num_packed, width = window.shape
    neighbour = np.arange(num_packed)[:, None] + np.arange(1 - width, 1)
    reads = np.flatnonzero((window >= 0) & (window != neighbour))
    row = window.reshape(-1)[reads]
    rows, counts = np.unique(row, return_counts=True)
    ptr = np.concatenate([[0], np.cumsum(counts)])
    return rows, ptr, reads[np.argsort(row, kind="stable")]
