"""DFS next-fit: microbatches filled in lexicographic order, placed heaviest first."""

from __future__ import annotations

import time

from harts.data.trajectory import TrajectoryBatch
from harts.plan.partition import next_fit
from harts.plan.placement import place_greedily
from harts.plan.step_plan import StepPlan
from harts.tree.order import sort_trajectories
from plan_baselines.assemble import assemble


def plan_next_fit(batch: TrajectoryBatch, capacity: int, replicas: int) -> StepPlan:
    """One sort, then O(N log N). Raises PlanError as `next_fit` does."""
    started = time.perf_counter()
    order = sort_trajectories(batch)
    partition = next_fit(order, capacity=capacity, replicas=replicas)
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
