"""The least total work over all partitions into microbatches within the capacity, for tiny N.

Contiguous or not; the number of microbatches is a multiple of the replicas.
"""

from __future__ import annotations

import time

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.plan.step_plan import StepPlan
from harts.tree.order import TrajectoryOrder, sort_trajectories
from plan_baselines.assemble import assemble_greedily

LARGEST = 12


def plan_exhaustively(batch: TrajectoryBatch, capacity: int, replicas: int) -> StepPlan:
    """O(3^N * replicas) by dynamic programming over subsets, so N is at most 12.

    Raises PlanError where N is larger or no such partition exists.
    """
    started = time.perf_counter()
    if len(batch) > LARGEST:
        raise PlanError(f"{len(batch)} trajectories; exhaustive search takes at most {LARGEST}")
    order = sort_trajectories(batch)
    subsets = _best_subsets(_work_of_subsets(order), capacity, replicas)
    if subsets is None:
        raise PlanError(
            f"no partition of {len(batch)} trajectories within capacity {capacity} has a multiple "
            f"of {replicas} microbatches"
        )
    members = [
        np.array([place for place in range(len(batch)) if subset >> place & 1])
        for subset in subsets
    ]
    return assemble_greedily(
        batch, order, members, capacity=capacity, replicas=replicas, started=started
    )


def _work_of_subsets(order: TrajectoryOrder) -> list[int]:
    """Rows of every subset of places, as a bit mask: the last place adds what it does not share."""
    lcp, lengths = order.lcp.tolist(), order.lengths.tolist()
    work = [0]
    for last in range(len(lengths)):
        for subset in range(1 << last):
            before = subset.bit_length() - 1
            shared = min(lcp[before + 1 : last + 1]) if subset else 0
            work.append(work[subset] + lengths[last] - shared)
    return work


def _best_subsets(work: list[int], capacity: int, replicas: int) -> list[int] | None:
    """Disjoint subsets that cover all places; the block with the last place is chosen first.

    best[mask][r]: least work of a partition of mask into r (modulo replicas) blocks, and the block
    that holds its last place.
    """
    unreachable = (sum(work) + 1, 0)
    best = [[unreachable] * replicas for _ in work]
    best[0][0] = (0, 0)
    for mask in range(1, len(work)):
        last = 1 << (mask.bit_length() - 1)
        others = rest = mask ^ last
        while True:
            block = rest | last
            if work[block] <= capacity:
                for count in range(replicas):
                    total = best[mask ^ block][count - 1][0] + work[block]
                    if total < best[mask][count][0]:
                        best[mask][count] = (total, block)
            if not rest:
                break
            rest = (rest - 1) & others
    chosen, mask, count = [], len(work) - 1, 0
    while mask:
        block = best[mask][count][1]
        if not block:
            return None
        chosen.append(block)
        mask, count = mask ^ block, (count - 1) % replicas
    return chosen
