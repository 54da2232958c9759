"""Trajectories longer than a microbatch: an error that names one, or dropped and listed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.tree.order import Ints

OverCapacity = Literal["error", "drop"]
MOST_NAMES = 10
RAISE = "raise the capacity (--capacity; plan.capacity in a run)"


def within_capacity(
    batch: TrajectoryBatch, capacity: int, over_capacity: OverCapacity
) -> tuple[TrajectoryBatch, Ints]:
    """The batch without trajectories above the capacity, and which those were, int64.

    PlanError where there is one and over_capacity is "error", or where none would be left.
    """
    if over_capacity not in get_args(OverCapacity):
        raise PlanError(f"over_capacity is {over_capacity!r}; choose 'error' or 'drop'")
    too_long = np.flatnonzero(batch.lengths > capacity)
    if not len(too_long):
        return batch, too_long
    first, others = int(too_long[0]), len(too_long) - 1
    problem = (
        f"{batch.name_of(first)} has {batch.lengths[first]:,} tokens, more than the "
        f"capacity {capacity:,}"
    )
    if others:
        are = "trajectory is" if others == 1 else "trajectories are"
        problem += f" (and {others:,} more {are} too long)"
    if over_capacity == "error":
        raise PlanError(f"{problem}; {RAISE} or split it, or drop it (over_capacity 'drop')")
    if len(too_long) == len(batch):
        raise PlanError(f"{problem}, and no trajectory is left; {RAISE}")
    return batch.select(np.flatnonzero(batch.lengths <= capacity)), too_long


def dropped_text(batch: TrajectoryBatch, dropped: Ints) -> str:
    """What was dropped, for people: "8 of 20: name, name, ..." with at most ten names."""
    names = [batch.name_of(i) for i in dropped.tolist()]
    return f"{len(dropped):,} of {len(batch):,}: {first_names(names)}"


def first_names(names: Sequence[str]) -> str:
    """At most ten, and dots for the others."""
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
