"""Turn memberships into a StepPlan, so that baselines are checked and measured like harts."""

from __future__ import annotations

import time

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.plan.denominators import Denominators
from harts.plan.partition import Partition
from harts.plan.placement import Placement, place_greedily
from harts.plan.step_plan import StepPlan
from harts.tree.order import Ints, TrajectoryOrder


def assemble(
    batch: TrajectoryBatch,
    order: TrajectoryOrder,
    partition: Partition,
    placement: Placement,
    *,
    capacity: int,
    replicas: int,
    started: float,
) -> StepPlan:
    """The plan of these memberships; started: time.perf_counter() when planning began."""
    microbatch_of_trajectory = np.empty(len(batch), np.int64)
    microbatch_of_trajectory[order.ids] = partition.microbatch_of_place
    return StepPlan(
        batch=batch,
        order=order,
        capacity=capacity,
        replicas=replicas,
        chunk_size=64,
        microbatch_of_trajectory=microbatch_of_trajectory,
        replica_of_microbatch=placement.replica_of_microbatch,
        slot_of_microbatch=placement.slot_of_microbatch,
        compact_tokens_of_microbatch=partition.rows,
        denominators=Denominators.of(batch.loss_mask, batch.offsets),
        dropped=np.empty(0, np.int64),
        plan_seconds=time.perf_counter() - started,
    )


def assemble_greedily(
    batch: TrajectoryBatch,
    order: TrajectoryOrder,
    members: list[Ints],
    *,
    capacity: int,
    replicas: int,
    started: float,
) -> StepPlan:
    """The plan of microbatches given by the places of their members, placed as the paper does."""
    partition = partition_of(order, members)
    placement = place_greedily(partition.rows, replicas=replicas)
    return assemble(
        batch,
        order,
        partition,
        placement,
        capacity=capacity,
        replicas=replicas,
        started=started,
    )


def partition_of(order: TrajectoryOrder, members: list[Ints]) -> Partition:
    """Partition from the ascending places of each microbatch; O(N log N)."""
    microbatch_of_place = np.empty(len(order.ids), np.int64)
    for index, places in enumerate(members):
        microbatch_of_place[places] = index
    rows = np.array([rows_of(order, places) for places in members], dtype=np.int64)
    return Partition(microbatch_of_place, rows)


def rows_of(order: TrajectoryOrder, places: Ints) -> int:
    """Unique prefixes of the trajectories at ascending places (Equation 5)."""
    return int(order.take(places).new_rows.sum())
