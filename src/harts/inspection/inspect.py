"""inspect_batch: order, tasks, forest, breaks; what a person wants to know before training."""

from __future__ import annotations

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.inspection.breaks import find_breaks, named
from harts.inspection.classify import Decode
from harts.inspection.paths import scored_paths
from harts.inspection.result import Inspection, Trajectories
from harts.inspection.scored_again import scored_again
from harts.inspection.shape import by_depth, by_fan_out, forest_shape
from harts.inspection.tasks import names_by_field, tasks_of
from harts.plan.options import at_least_one
from harts.tree.order import TrajectoryOrder, sort_trajectories
from harts.tree.segments import build_segments


def inspect_batch(
    batch: TrajectoryBatch,
    *,
    capacity: int = 65536,
    chunk_size: int = 64,
    decode: Decode | None = None,
) -> Inspection:
    """Everything `harts inspect` tells about a batch.

    capacity, chunk_size: in rows, as for `plan_step`. Tasks and rollouts go by the fields known
    as group_id and rollout_id; steps of a rollout are in batch order. decode: token ids -> text,
    names the breaks that token ids alone cannot tell and fills in the examples.
    Raises PlanError for a capacity or chunk size below 1. One sort, then O(S).
    """
    capacity = at_least_one("capacity", capacity)
    chunk_size = at_least_one("chunk_size", chunk_size)
    order = sort_trajectories(batch)
    forest = build_segments(order)
    task_field, tasks = names_by_field(batch, "group_id")
    rollout_field, rollout_names = names_by_field(batch, "rollout_id")
    rollouts = list(zip(tasks, rollout_names, strict=True))
    return Inspection(
        capacity=capacity,
        chunk_size=chunk_size,
        task_field=task_field,
        rollouts=0 if rollout_field is None else len(set(rollouts)),
        scored_again=0 if rollout_field is None else scored_again(batch, order, rollouts),
        trajectories=_trajectories(batch, order, capacity),
        forest=forest_shape(forest, chunk_size),
        tasks=tasks_of(batch, order, tasks, None if rollout_field is None else rollout_names),
        by_depth=by_depth(forest),
        by_fan_out=by_fan_out(forest),
        breaks=find_breaks(batch, order, rollouts, rollout_field, decode),
    )


def _trajectories(batch: TrajectoryBatch, order: TrajectoryOrder, capacity: int) -> Trajectories:
    lengths = batch.lengths
    over = np.flatnonzero(lengths > capacity)
    over = over[np.argsort(-lengths[over], kind="stable")]
    duplicates, nested = _repetitions(order)
    is_scored = np.logical_or.reduceat(batch.loss_mask, batch.offsets[:-1])
    return Trajectories(
        count=len(batch),
        raw_tokens=len(batch.tokens),
        scored_tokens=int(batch.loss_mask.sum()),
        head_rows=_head_rows(batch, order),
        unscored=int((~is_scored).sum()),
        longest=named(batch, int(lengths.argmax())),
        median_length=float(np.median(lengths)),
        duplicates=duplicates,
        nested=nested,
        over_capacity=tuple(named(batch, i) for i in over.tolist()),
    )


def _repetitions(order: TrajectoryOrder) -> tuple[int, int]:
    """Trajectories equal to an earlier one, and proper prefixes of another one.

    In lexicographic order a trajectory's copies, then its extensions, come right after it.
    """
    lcp, lengths = order.lcp.tolist(), order.lengths.tolist()
    duplicates = nested = 0
    is_nested = False  # whether the trajectory after this place is one
    for place in range(len(lengths) - 2, -1, -1):
        is_prefix_of_next = lcp[place + 1] == lengths[place]
        is_copy = is_prefix_of_next and lengths[place + 1] == lengths[place]
        is_nested = is_prefix_of_next and (is_nested or not is_copy)
        duplicates += is_copy
        nested += is_nested
    return duplicates, nested


def _head_rows(batch: TrajectoryBatch, order: TrajectoryOrder) -> int:
    """Rows whose next token some trajectory scores."""
    is_needed = np.zeros(int(order.new_rows.sum()), np.bool_)
    for _, path, scored in scored_paths(batch, order):
        is_needed[path.rows(scored - 1)] = True
    return int(is_needed.sum())
