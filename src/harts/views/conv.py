"""Causal convolution: every chain with the true ancestors of its first row in front."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harts.views.chains import Chain
from harts.views.gather import RowGather, build_row_gather


@dataclass(frozen=True)
class ConvView:
    """Chains with width - 1 context rows in front; a context row before the root is -1 (zero).

    The context may span several ancestor segments; it is never a neighbouring chain.
    extended.own[c] is the extended row of compact row c; its window is the width rows that end
    there.
    """

    width: int
    extended: RowGather


def build_conv_view(chains: list[Chain], width: int, device: torch.device) -> ConvView:
    """Extend every chain by its context, chains in row order. O(C + N * width)."""
    pieces, is_own = [], []
    for chain in sorted(chains, key=lambda c: c.start):
        context = chain.ancestors_from(max(0, chain.depth - (width - 1)))
        pieces.append(np.full(width - 1 - len(context), -1))
        pieces.append(context)
        pieces.append(np.arange(chain.start, chain.stop))
        is_own.append(np.repeat([False, True], [width - 1, chain.stop - chain.start]))
    source = np.concatenate(pieces).astype(np.int64)
    return ConvView(width, build_row_gather(source, np.concatenate(is_own), device))
