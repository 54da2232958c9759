"""Microbatch membership: DFS next-fit over the lexicographic order, aligned to the replicas.

A contiguous interval costs its first trajectory plus what each later one adds (Equation 5), and
splitting it at place t costs exactly lcp[t] more (Equation 6).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harts.errors import PlanError
from harts.tree.order import Ints, TrajectoryOrder


@dataclass(frozen=True)
class Partition:
    """Which microbatch each place of the order belongs to, and the rows of each microbatch.

    microbatch_of_place: int64 (N,). rows: int64 (K,), compact work C(M).
    """

    microbatch_of_place: Ints
    rows: Ints


def next_fit(order: TrajectoryOrder, *, capacity: int, replicas: int) -> Partition:
    """Fill microbatches in lexicographic order; K is a multiple of `replicas`. O(N log N).

    Raises PlanError where no multiple of `replicas` can be reached. Every trajectory must fit
    the capacity (the caller checks).
    """
    cuts, used = [0], 0
    for place, (length, new) in enumerate(
        zip(order.lengths.tolist(), order.new_rows.tolist(), strict=True)
    ):
        if place and used + new > capacity:
            cuts.append(place)
            used = length
        else:
            used += new
    wanted = -(-len(cuts) // replicas) * replicas
    if wanted <= len(order.ids):
        return _contiguous(order, _add_cheapest_cuts(order, cuts, wanted))
    fewer = len(order.ids) // replicas * replicas
    return _merge_to(order, cuts, fewer, capacity, replicas)


def _add_cheapest_cuts(order: TrajectoryOrder, cuts: list[int], wanted: int) -> list[int]:
    """Cut where neighbours share least until there are `wanted` microbatches."""
    taken = set(cuts)
    by_cost = np.argsort(order.lcp, kind="stable").tolist()
    free = [place for place in by_cost if place not in taken]
    return sorted(cuts + free[: wanted - len(cuts)])


def _contiguous(order: TrajectoryOrder, cuts: list[int]) -> Partition:
    starts = np.zeros(len(order.ids), np.int64)
    starts[cuts] = 1
    new_rows = order.new_rows.copy()
    new_rows[cuts] = order.lengths[cuts]
    microbatch = np.cumsum(starts) - 1
    rows = np.bincount(microbatch, weights=new_rows, minlength=len(cuts)).astype(np.int64)
    return Partition(microbatch, rows)


def _merge_to(
    order: TrajectoryOrder, cuts: list[int], wanted: int, capacity: int, replicas: int
) -> Partition:
    """Merge the pairs that save most rows and fit, where there are too few trajectories to split.

    Only reached when N < D * ceil(K / D), so K is below N and N below K + D.
    """
    groups = [np.arange(a, b) for a, b in zip(cuts, [*cuts[1:], len(order.ids)], strict=True)]
    work = [_rows_of(order, group) for group in groups]
    while len(groups) > wanted and wanted > 0:
        best: tuple[int, int, int] | None = None
        for i in range(len(groups)):
            for j in range(i + 1, len(groups)):
                union = _rows_of(order, np.union1d(groups[i], groups[j]))
                saving = work[i] + work[j] - union
                if union <= capacity and (best is None or saving > best[0]):
                    best = (saving, i, j)
        if best is None:
            break
        _, i, j = best
        groups[i] = np.union1d(groups[i], groups.pop(j))
        work[i] = _rows_of(order, groups[i])
        work.pop(j)
    if not wanted or len(groups) > wanted:
        raise PlanError(
            f"{len(order.ids)} trajectories do not form a multiple of {replicas} non-empty "
            f"microbatches within capacity {capacity}; lower replicas, raise the capacity, or "
            "give more trajectories"
        )
    microbatch = np.empty(len(order.ids), np.int64)
    for index, group in enumerate(groups):
        microbatch[group] = index
    return Partition(microbatch, np.array(work, dtype=np.int64))


def _rows_of(order: TrajectoryOrder, places: Ints) -> int:
    return int(order.take(places).new_rows.sum())
