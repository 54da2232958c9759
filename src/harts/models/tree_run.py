"""What a layer is given beside its rows when it computes a tree: the view, and how to run it."""

from __future__ import annotations

from dataclasses import dataclass

from harts.models.kernels import Kernels
from harts.views.tree import TreeView


@dataclass(frozen=True)
class TreeRun:
    """view: index tensors of the microbatch. kernels: implementations of the operators.
    recomputed: every layer runs again in backward, so that what one keeps lives for that layer
    only and need not be little.

    It travels as the keyword argument `tree`, never as a global: recomputation and pipeline
    schedules run layers later and in other threads.
    """

    view: TreeView
    kernels: Kernels
    recomputed: bool = False
