"""Does anything cross from one branch to another? Probed part by part on a tiny model's layers.

One row of a small tree is changed at a time. Rows that do not descend from it must keep every
bit. Recurrence, convolution and attention are probed apart: others have passed the boundaries to
one and forgotten the other, and a layer's output then differs by little.

Legend: C compact rows, D channels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harts.data.trajectory import TrajectoryBatch
from harts.models.linear_layers import convolve, pack, unpack
from harts.models.tree_model import TreeModel
from harts.models.tree_run import TreeRun
from harts.ops.attention import tree_attention
from harts.plan.microbatch import MicroBatch
from harts.plan.planner import plan_step

ALL_PARTS = ("recurrence", "convolution", "attention")


@dataclass(frozen=True)
class Leak:
    """Changing one row moved another that is not below it, or did not move its own.

    part: recurrence, convolution or attention. changed, moved: rows by depth and trajectory, as
    text. amount: largest absolute movement, 0 where the row's own output did not move.
    """

    part: str
    changed: str
    moved: str
    amount: float


def three_level_tree() -> MicroBatch:
    """Forks inside a chunk, on a chunk boundary and one deeper; a leaf of one token; two roots."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 16, 400).tolist()
    trunk, middle = tokens[:70], tokens[70:128]
    paths = [
        [*trunk, *middle, *tokens[128:150]],
        [*trunk, *middle, 15 - tokens[128]],
        [*trunk, *middle[:30], 15 - middle[30], *tokens[150:230]],
        [*trunk, 15 - middle[0], *tokens[230:236]],
        [15 - tokens[0], *tokens[240:250]],
    ]
    rows = [{"input_ids": path, "loss_mask": [0] + [1] * (len(path) - 1)} for path in paths]
    plan = plan_step(TrajectoryBatch.from_rows(rows), capacity=4096)
    return plan.microbatches()[0]


def find_leak(part: str, tree_model: TreeModel, microbatch: MicroBatch) -> Leak | None:
    """The first leak of one part, or None.

    part: one of ALL_PARTS; the first two need a model with linear attention. Runs on the model's
    device with its kernels. One forward pass of the part for each of about twenty rows.
    """
    run = TreeRun(tree_model.view(microbatch), tree_model.kernels)
    probe, channels = _PROBES[part](tree_model, run)
    draw = torch.Generator().manual_seed(0)
    weight = tree_model.model.get_input_embeddings().weight
    rows_CD = torch.randn(microbatch.num_rows, channels, generator=draw).to(weight)
    end = microbatch.layout.end
    with torch.no_grad():
        before = probe(rows_CD)
        for row in _telling_rows(microbatch):
            changed_CD = rows_CD.clone()
            changed_CD[row] += 1
            moved = (probe(changed_CD) != before).flatten(1).any(1).cpu().numpy()
            if not moved[row]:
                return Leak(part, _place(microbatch, row), _place(microbatch, row), 0.0)
            outside = np.flatnonzero(moved)
            outside = outside[(outside < row) | (outside >= end[row])]
            if len(outside):
                difference = (probe(changed_CD) - before)[outside].abs().max()
                place = _place(microbatch, int(outside[0]))
                return Leak(part, _place(microbatch, row), place, float(difference))
    return None


Probe = Callable[[torch.Tensor], torch.Tensor]
"""(C, D) -> (C, ...), one part of a model over the compact rows of a tree."""


def _recurrence(tree_model: TreeModel, run: TreeRun) -> tuple[Probe, int]:
    """The first linear layer with a convolution that reads the row itself alone."""
    layer = copy.deepcopy(_first_linear_layer(tree_model))
    with torch.no_grad():
        layer.conv1d.weight.zero_()[..., -1] = 1
    width = tree_model.model.get_input_embeddings().weight.shape[1]

    def probe(rows_CD: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer(rows_CD[None], tree=run)
        return output[0]

    return probe, width


def _convolution(tree_model: TreeModel, run: TreeRun) -> tuple[Probe, int]:
    """The first linear layer's convolution alone."""
    conv1d = _first_linear_layer(tree_model).conv1d

    def probe(rows_CD: torch.Tensor) -> torch.Tensor:
        packed = pack(rows_CD[None], run)
        (output,) = convolve([packed], conv1d, "silu", run, unit_widths=[None])
        return unpack(output, run)[0]

    return probe, conv1d.weight.shape[0]


def _attention(tree_model: TreeModel, run: TreeRun) -> tuple[Probe, int]:
    """Attention alone, 2 heads of 32, keys and values of one head."""

    def probe(rows_CD: torch.Tensor) -> torch.Tensor:
        q, kv = rows_CD.view(-1, 3, 32).split([2, 1], dim=1)
        return tree_attention(
            q, kv, kv, view=run.view.attention, scale=0.2, impl=run.kernels.attention
        )

    return probe, 96


_PROBES: dict[str, Callable[[TreeModel, TreeRun], tuple[Probe, int]]] = {
    "recurrence": _recurrence,
    "convolution": _convolution,
    "attention": _attention,
}


def _first_linear_layer(tree_model: TreeModel) -> Any:
    kinds = tuple(tree_model.family.linear_mixers.values())
    return next(module for module in tree_model.model.modules() if isinstance(module, kinds))


def _telling_rows(microbatch: MicroBatch) -> list[int]:
    """First, last and last but two row of each segment: what a neighbour would read first."""
    layout = microbatch.layout
    rows: set[int] = set()
    for first, length in zip(layout.first_row.tolist(), layout.forest.length.tolist(), strict=True):
        rows |= {first, first + length - 1, first + max(0, length - 3)}
    return sorted(rows)


def _place(microbatch: MicroBatch, row: int) -> str:
    layout = microbatch.layout
    semantic = int(np.flatnonzero(layout.semantic_to_compact == row)[0])
    trajectory = int(np.searchsorted(microbatch.batch.offsets, semantic, side="right")) - 1
    return f"position {layout.positions[row]} of trajectory {trajectory}"
