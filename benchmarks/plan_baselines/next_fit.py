"""DFS next-fit: microbatches filled in lexicographic order, placed heaviest first."""

from __future__ import annotations

from harts.data.trajectory import TrajectoryBatch
from harts.plan.planner import plan_step
from harts.plan.step_plan import StepPlan


def plan_next_fit(batch: TrajectoryBatch, capacity: int, replicas: int) -> StepPlan:
    """One sort, then O(N log N). Raises PlanError as `plan_step` does."""
    return plan_step(batch, capacity, replicas, planner="next-fit")
