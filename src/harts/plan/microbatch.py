"""One microbatch: its trajectories, its scored positions, its compact layout and its chains."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from harts.data.trajectory import TrajectoryBatch
from harts.plan.calls import CallPlan, plan_calls
from harts.tree.compact import CompactLayout, lay_out
from harts.tree.order import Ints, TrajectoryOrder
from harts.tree.segments import SegmentForest, build_segments


@dataclass(frozen=True)
class MicroBatch:
    """Trajectories that are computed together.

    index: microbatch id in the plan. batch: the whole batch. order: the members in
    lexicographic order. trajectory_ids: int64 (n,), ascending.

    Everything derived is computed on first use and kept.
    """

    index: int
    batch: TrajectoryBatch
    order: TrajectoryOrder
    chunk_size: int

    @cached_property
    def trajectory_ids(self) -> Ints:
        """Members by ascending index in the batch, int64 (n,)."""
        return np.sort(self.order.ids)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each member, int64 (n,)."""
        return self.batch.lengths[self.trajectory_ids]

    @cached_property
    def forest(self) -> SegmentForest:
        """The segment forest of the members."""
        return build_segments(self.order)

    @cached_property
    def calls(self) -> CallPlan:
        """Chains and rounds for linear attention."""
        return plan_calls(self.forest.parent, self.forest.length, chunk_size=self.chunk_size)

    @cached_property
    def layout(self) -> CompactLayout:
        """Compact rows in DFS preorder, direct child first."""
        return lay_out(self.batch, self.order, self.forest, self.calls.direct_child)

    @property
    def num_rows(self) -> int:
        """Compact rows C(M)."""
        return self.forest.num_rows

    @property
    def num_tokens(self) -> int:
        """Semantic positions: tokens of all members."""
        return int(self.lengths.sum())

    @property
    def num_scored(self) -> int:
        """Scored positions P."""
        return len(self.scored)

    @cached_property
    def batch_position(self) -> Ints:
        """Index into the batch's flat arrays of every token of the members, int64 (tokens,)."""
        offset = self.batch.offsets[self.trajectory_ids] - self._starts
        return np.arange(self.num_tokens) + np.repeat(offset, self.lengths)

    @cached_property
    def scored(self) -> Ints:
        """Places of the scored positions among the members' tokens, ascending, int64 (P,)."""
        return np.flatnonzero(self.batch.loss_mask[self.batch_position])

    @cached_property
    def fields(self) -> dict[str, npt.NDArray[Any]]:
        """Every field at the scored positions, (P,) each, in the order of `out.log_probs`.

        Position fields, trajectory fields repeated, and two of harts' own: `trajectory_index`
        (index in the batch) and `position` (depth in the trajectory), both int64.
        """
        trajectory = np.repeat(self.trajectory_ids, self.lengths)[self.scored]
        flat = self.batch_position[self.scored]
        fields = {name: values[flat] for name, values in self.batch.position_fields.items()}
        for name, values in self.batch.trajectory_fields.items():
            fields[name] = values[trajectory]
        fields["trajectory_index"] = trajectory
        fields["position"] = flat - self.batch.offsets[trajectory]
        return fields

    def scatter(self, values: Any, fill: float = 0.0) -> list[Any]:
        """One array a trajectory, full length: `values` at its scored tokens, `fill` elsewhere.

        values: (P,) numpy array or torch tensor (stays differentiable), in the order of
        `out.log_probs`. Returns n arrays, by ascending trajectory id.
        """
        flat = _place(values, self.scored, (self.num_tokens,), fill)
        return [flat[a : a + n] for a, n in zip(self._starts, self.lengths, strict=True)]

    def padded(self, values: Any, fill: float = 0.0) -> Any:
        """`values` as (trajectory, time), right-padded with `fill` to the longest member."""
        width = int(self.lengths.max())
        row = np.repeat(np.arange(len(self.lengths)), self.lengths)
        time = np.arange(self.num_tokens) - np.repeat(self._starts, self.lengths)
        places = (row * width + time)[self.scored]
        flat = _place(values, places, (len(self.lengths) * width,), fill)
        return flat.reshape(len(self.lengths), width)

    @cached_property
    def _starts(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])


def _place(values: Any, places: Ints, shape: tuple[int], fill: float) -> Any:
    """A filled array with values at places; torch in, torch out, without importing it for numpy."""
    if len(values) != len(places):
        raise ValueError(
            f"got {len(values)} values for {len(places)} scored positions; "
            "give one value per scored position, in the order of out.log_probs"
        )
    if hasattr(values, "new_full"):
        torch = importlib.import_module("torch")
        index = torch.as_tensor(places, device=values.device)
        return values.new_full(shape, fill).index_put((index,), values)
    values = np.asarray(values)
    filled = np.full(shape, fill, dtype=values.dtype)
    filled[places] = values
    return filled
