"""plan_step: order, candidates, place, best, refine (paper section 3.2)."""

from __future__ import annotations

import os
import time
from typing import Literal, get_args

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.plan.balance import balance_slots
from harts.plan.candidates import candidate_partitions
from harts.plan.cost import PrefixCost
from harts.plan.denominators import Denominators
from harts.plan.local_search import search_memberships
from harts.plan.objective import plan_objective
from harts.plan.options import PlannerOptions, at_least_one
from harts.plan.over_capacity import OverCapacity, within_capacity
from harts.plan.paired import place_evenly
from harts.plan.partition import Partition, next_fit
from harts.plan.placement import Placement, place_greedily
from harts.plan.step_plan import StepPlan
from harts.tree.order import sort_trajectories

Planner = Literal["harts", "next-fit"]
DEFAULTS = PlannerOptions()


def plan_step(
    batch: TrajectoryBatch,
    capacity: int = 65536,
    replicas: int = 1,
    chunk_size: int = 64,
    *,
    planner: Planner = "harts",
    over_capacity: OverCapacity = "error",
    options: PlannerOptions = DEFAULTS,
) -> StepPlan:
    """Plan one optimisation step: microbatches within `capacity` compact rows, their replica
    and slot.

    Eager and deterministic; equal prefixes merge across groups. capacity and chunk_size are in
    rows, both at least 1. planner: "harts" searches (paper section 3.2 and beyond), "next-fit"
    fills microbatches in lexicographic order. over_capacity: a trajectory longer than the
    capacity is an error that names it, or is dropped and listed in `plan.dropped`; indices of
    trajectories are then those of `plan.batch`, without the dropped ones.
    Raises PlanError for that, for anything but a TrajectoryBatch, for fewer trajectories than
    replicas, and when no multiple of `replicas` microbatches is found.
    """
    started = time.perf_counter()
    if planner not in get_args(Planner):
        raise PlanError(f"planner is {planner!r}; choose 'harts' or 'next-fit'")
    if not isinstance(batch, TrajectoryBatch):
        raise PlanError(_not_a_batch(batch))
    options = options.for_size(len(batch))
    capacity = at_least_one("capacity", capacity)
    replicas = at_least_one("replicas", replicas)
    chunk_size = at_least_one("chunk_size", chunk_size)
    batch, dropped = within_capacity(batch, capacity, over_capacity)
    if len(batch) < replicas:
        raise PlanError(
            f"{len(batch)} trajectories for {replicas} replicas; "
            "every replica needs one, so lower replicas or give more trajectories"
        )
    order = sort_trajectories(batch)
    if planner == "next-fit":
        partition = next_fit(order, capacity=capacity, replicas=replicas)
        options = PlannerOptions.paper()
    else:
        cost = PrefixCost.of(order)
        candidates = candidate_partitions(
            cost, capacity=capacity, replicas=replicas, options=options
        )
        if not candidates:  # nothing could be aligned: merge what fits, or say why not
            candidates = [next_fit(order, capacity=capacity, replicas=replicas)]
        partition = _improved(
            cost, _best(candidates, replicas, options), capacity, replicas, options
        )
    placement = _placed(partition, replicas, options)
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
        dropped=dropped,
        plan_seconds=time.perf_counter() - started,
    )


def _not_a_batch(given: object) -> str:
    if isinstance(given, str | os.PathLike):
        path = repr(os.fspath(given))
        return f"batch is the path {path}; read it first: harts.plan_step(harts.read({path}), ...)"
    if isinstance(given, list | tuple):
        return f"batch is a {type(given).__name__}; give harts.TrajectoryBatch.from_rows(rows)"
    return (
        f"batch is a {type(given).__name__}; give a TrajectoryBatch, from harts.read(path) or "
        "harts.TrajectoryBatch.from_rows(rows)"
    )


def _improved(
    cost: PrefixCost,
    partition: Partition,
    capacity: int,
    replicas: int,
    options: PlannerOptions,
) -> Partition:
    """Beyond the paper: memberships of less work, then even slots; never worse by Equation 4."""
    searched = search_memberships(
        cost,
        partition,
        capacity=capacity,
        replicas=replicas,
        iterations=options.search_steps,
        use_numba=options.use_numba,
    )
    balanced = balance_slots(
        cost,
        searched,
        capacity=capacity,
        replicas=replicas,
        iterations=options.balance_steps,
        use_numba=options.use_numba,
    )
    return _best([balanced, searched, partition], replicas, options)


def _best(partitions: list[Partition], replicas: int, options: PlannerOptions) -> Partition:
    """The first of least objective (Equation 4); only those of least work need placing for it."""
    least = min(int(p.rows.sum()) for p in partitions)
    contenders = [p for p in partitions if int(p.rows.sum()) == least]
    return min(contenders, key=lambda p: plan_objective(p.rows, _placed(p, replicas, options)))


def _placed(partition: Partition, replicas: int, options: PlannerOptions) -> Placement:
    place = place_evenly if options.placement == "even" else place_greedily
    return place(partition.rows, replicas=replicas)
