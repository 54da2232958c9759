"""Full attention: the interval test over rows, and each chain's ancestor runs.

Rows lie in DFS preorder, so row k is an ancestor of row q (or q itself) iff k <= q < end[k].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from harts.plan.microbatch import MicroBatch
from harts.views.chains import Chain
from harts.views.gather import on_device

Built = TypeVar("Built")


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

    def once(self, build: Callable[[AttentionView], Built]) -> Built:
        """build(self) on the first call, the same object on later ones: every layer shares it.

        For what a kernel derives from the view alone, such as its block lists.
        """
        if build not in self._built:
            with torch.inference_mode(False):  # built while evaluating, it also serves training
                self._built[build] = build(self)
        return self._built[build]

    @cached_property
    def _built(self) -> dict[Callable[[AttentionView], Any], Any]:
        return {}


def build_attention_view(
    microbatch: MicroBatch, chains: list[Chain], device: torch.device
) -> AttentionView:
    """Interval ends and chains of a microbatch."""
    rows = [ChainRows(c.start, c.stop, c.ancestors) for c in sorted(chains, key=lambda c: c.start)]
    return AttentionView(on_device(microbatch.layout.end, device), tuple(rows))
