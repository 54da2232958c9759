"""Full attention: the interval test over rows, and each chain's ancestor runs.

Rows lie in DFS preorder, so row k is an ancestor of row q (or q itself) iff k <= q < end[k].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harts.plan.microbatch import MicroBatch
from harts.views.chains import Chain
from harts.views.gather import on_device


@dataclass(frozen=True)
class ChainRows:
    """Own rows [start, stop) of one chain and the runs of rows of its ancestors, ascending.

    The runs are disjoint, and the keys a chain sees are these runs followed by its own rows
    (Equations 21 and 22).
    """

    start: int
    stop: int
    ancestors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AttentionView:
    """end: int32 (C,), one past the last row of each row's subtree; chains in row order."""

    end: torch.Tensor
    chains: tuple[ChainRows, ...]


def build_attention_view(
    microbatch: MicroBatch, chains: list[Chain], device: torch.device
) -> AttentionView:
    """Interval ends and chains of a microbatch."""
    rows = [ChainRows(c.start, c.stop, c.ancestors) for c in sorted(chains, key=lambda c: c.start)]
    return AttentionView(on_device(microbatch.layout.end, device), tuple(rows))
