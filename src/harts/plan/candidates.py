"""Candidate memberships of a step (paper section 3.2): contiguous, greedy, refined."""

from __future__ import annotations

from harts.plan.cost import PrefixCost
from harts.plan.exact import exact_partitions
from harts.plan.greedy import greedy_candidate
from harts.plan.natural import candidate_range, natural_partition
from harts.plan.options import PlannerOptions
from harts.plan.partition import Partition
from harts.plan.refine import refine_boundaries
from harts.plan.repair import repair_memberships
from harts.plan.sampled import sampled_partitions


def candidate_partitions(
    cost: PrefixCost, *, capacity: int, replicas: int, options: PlannerOptions
) -> list[Partition]:
    """Every candidate that is compared under Equation 4; empty where none can be aligned.

    Up to exact_limit trajectories: exact contiguous partitions as they are, and the greedy one
    refined. Above it: sampled-K partitions, and at most refined_anchors of all candidates
    refined. Every trajectory must fit the capacity.
    """
    natural = natural_partition(cost, capacity=capacity)
    counts = candidate_range(cost, len(natural.rows), capacity=capacity, replicas=replicas)
    greedy = greedy_candidate(
        cost, capacity=capacity, replicas=replicas, use_numba=options.use_numba
    )
    candidates = anchors = [greedy] if greedy else []
    small = len(cost) <= options.exact_limit
    if small or options.contiguous == "exact":
        exact = exact_partitions(cost, counts, capacity=capacity, use_numba=options.use_numba)
        candidates = [*exact.values(), *candidates]
    if not small:
        base = sampled_partitions(cost, natural, counts, capacity=capacity, limit=options.sampled_k)
        candidates = [*base.values(), *candidates]
        anchors = _anchors(base, greedy, options.refined_anchors)
    return candidates + [_refined(cost, anchor, capacity, options) for anchor in anchors]


def _anchors(base: dict[int, Partition], greedy: Partition | None, limit: int) -> list[Partition]:
    """The greedy candidate, the base candidate of least work, and the one of closest K."""
    anchors = [greedy] if greedy else []
    by_work = sorted(base.values(), key=lambda p: (int(p.rows.sum()), len(p.rows)))
    anchors += by_work[:1]
    target = len(anchors[0].rows) if anchors else 0
    anchors += sorted(by_work[1:], key=lambda p: abs(len(p.rows) - target))
    return anchors[:limit]


def _refined(
    cost: PrefixCost, partition: Partition, capacity: int, options: PlannerOptions
) -> Partition:
    """Boundary refinement where the partition is contiguous, then sparse repair."""
    if _is_contiguous(partition):
        partition = refine_boundaries(
            cost,
            partition,
            capacity=capacity,
            neighbourhood=options.neighbourhood,
            sweeps=options.boundary_sweeps,
            use_numba=options.use_numba,
        )
    return repair_memberships(
        cost,
        partition,
        capacity=capacity,
        neighbourhood=options.neighbourhood,
        iterations=options.repair_iterations,
    )


def _is_contiguous(partition: Partition) -> bool:
    membership = partition.microbatch_of_place
    changes = int((membership[1:] != membership[:-1]).sum())
    return changes + 1 == len(partition.rows)
