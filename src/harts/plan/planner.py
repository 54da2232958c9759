"""plan_step: order, partition, place (paper section 3.2)."""

from __future__ import annotations

import time

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.plan.denominators import Denominators
from harts.plan.options import at_least_one
from harts.plan.partition import next_fit
from harts.plan.placement import place_greedily
from harts.plan.step_plan import StepPlan
from harts.tree.order import sort_trajectories


def plan_step(
    batch: TrajectoryBatch, capacity: int = 65536, replicas: int = 1, chunk_size: int = 64
) -> StepPlan:
    """Plan one optimisation step: microbatches within `capacity` compact rows, their replica
    and slot.

    Eager and deterministic; equal prefixes merge across groups. capacity and chunk_size are in
    rows, both at least 1. Raises PlanError when a trajectory is longer than the capacity, or
    when no multiple of `replicas` microbatches is found. One sort of the batch, then O(N log N).
    """
    started = time.perf_counter()
    capacity = at_least_one("capacity", capacity)
    replicas = at_least_one("replicas", replicas)
    chunk_size = at_least_one("chunk_size", chunk_size)
    _check_lengths(batch, capacity)
    if len(batch) < replicas:
        raise PlanError(
            f"{len(batch)} trajectories for {replicas} replicas; "
            "every replica needs one, so lower replicas or give more trajectories"
        )
    order = sort_trajectories(batch)
    partition = next_fit(order, capacity=capacity, replicas=replicas)
    placement = place_greedily(partition.rows, replicas=replicas)
    microbatch_of_trajectory = np.empty(len(batch), np.int64)
    microbatch_of_trajectory[order.ids] = partition.microbatch_of_place
    return StepPlan(
        batch=batch,
        order=order,
        capacity=capacity,
        replicas=replicas,
        chunk_size=chunk_size,
        microbatch_of_trajectory=microbatch_of_trajectory,
        replica_of_microbatch=placement.replica_of_microbatch,
        slot_of_microbatch=placement.slot_of_microbatch,
        compact_tokens_of_microbatch=partition.rows,
        denominators=Denominators.of(batch.loss_mask, batch.offsets),
        plan_seconds=time.perf_counter() - started,
    )


def _check_lengths(batch: TrajectoryBatch, capacity: int) -> None:
    too_long = np.flatnonzero(batch.lengths > capacity)
    if len(too_long):
        first, others = int(too_long[0]), len(too_long) - 1
        more = f" (and {others} more)" if others else ""
        raise PlanError(
            f"{batch.name_of(first)} has {batch.lengths[first]:,} tokens{more}, more than the "
            f"capacity {capacity:,}; raise --capacity or split it"
        )
