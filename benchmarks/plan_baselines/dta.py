"""AReaL-DTA's load-balanced batching (LB_by_DFS, arXiv 2602.00482) with a capacity.

Contiguous segments in lexicographic order, the limit on a segment's cost found by binary search;
each segment reaches as far as the limit allows. There the number of segments is that of the
replicas; here it is their smallest multiple at which the limit meets the capacity. Cost: rows.
"""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.plan.step_plan import StepPlan
from harts.tree.order import TrajectoryOrder, sort_trajectories
from plan_baselines.assemble import assemble_greedily


def plan_dta(batch: TrajectoryBatch, capacity: int, replicas: int) -> StepPlan:
    """One sort, then O(N log S). Every trajectory must fit the capacity.

    Raises PlanError where there are too few trajectories for a multiple of `replicas`.
    """
    started = time.perf_counter()
    order = sort_trajectories(batch)
    fewest = len(_cuts(order, capacity))
    wanted = -(-fewest // replicas) * replicas
    if wanted > len(batch):
        raise PlanError(
            f"{len(batch)} trajectories do not form {wanted} non-empty contiguous microbatches; "
            "lower replicas, raise the capacity, or give more trajectories"
        )
    cuts = _balance(order, _cuts(order, _smallest_limit(order, capacity, wanted)), wanted)
    members = [
        np.arange(begin, end) for begin, end in zip(cuts, [*cuts[1:], len(order.ids)], strict=True)
    ]
    return assemble_greedily(
        batch, order, members, capacity=capacity, replicas=replicas, started=started
    )


def _cuts(order: TrajectoryOrder, limit: int) -> list[int]:
    """First places of the segments when each takes all that `limit` rows hold."""
    cuts, used = [], limit
    for place, (length, new) in enumerate(
        zip(order.lengths.tolist(), order.new_rows.tolist(), strict=True)
    ):
        if used + new > limit:
            cuts.append(place)
            used = length
        else:
            used += new
    return cuts


def _smallest_limit(order: TrajectoryOrder, capacity: int, wanted: int) -> int:
    """The smallest limit that needs at most `wanted` segments, by bisection."""
    low, high = int(order.lengths.max()), capacity
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(order, middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    return high


def _balance(order: TrajectoryOrder, cuts: list[int], wanted: int) -> list[int]:
    """Halve the heaviest segment until there are `wanted`: a tight limit can need fewer."""
    bounds = [*cuts, len(order.ids)]
    while len(bounds) - 1 < wanted:
        best: tuple[int, int] | None = None  # rows of the segment, where to cut it
        for begin, end in pairwise(bounds):
            if end - begin < 2:
                continue
            new = order.new_rows[begin:end].copy()
            new[0] = order.lengths[begin]
            rows = int(new.sum())
            if best is None or rows > best[0]:
                left = np.cumsum(new)[:-1]
                right = rows - left + order.lcp[begin + 1 : end]
                best = (rows, begin + 1 + int(np.maximum(left, right).argmin()))
        assert best is not None, "fewer segments than trajectories, so one has two"
        bounds = sorted([*bounds, best[1]])
    return bounds[:-1]
