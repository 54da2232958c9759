"""Base candidates for large batches: merge or split the natural partition (paper section 3.2).

By Equation 6, merging two neighbouring microbatches saves adjacent_lcp at the cut between them
and a new cut costs adjacent_lcp there, whatever else was merged or cut. So the paper's repeated
choice of the best operation is one pass over the cuts in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from harts.plan.cost import PrefixCost
from harts.plan.partition import Partition
from harts.tree.order import Ints


def sampled_partitions(
    cost: PrefixCost, natural: Partition, candidates: Sequence[int], *, capacity: int, limit: int
) -> dict[int, Partition]:
    """{K: partition} for at most `limit` of the ascending candidate counts, where reachable.

    Below the natural count, the neighbours that save most rows and fit the capacity are merged;
    above it, microbatches are cut where that costs fewest rows; ties at the leftmost place.
    The plans of all counts lie on one such path. O(N log N), and O(N) for each count.
    """
    wanted = set(sample_counts(candidates, limit=limit))
    starts = np.flatnonzero(np.diff(natural.microbatch_of_place, prepend=-1))
    found = {len(starts): natural} if len(starts) in wanted else {}
    merged = _merged_starts(cost, starts, capacity)
    found |= {k: cost.cut_at(merged[k]) for k in sorted(wanted & merged.keys())}
    more_cuts = _cheapest_cuts(cost, starts)
    for k in sorted(wanted):
        if len(starts) < k <= len(cost):
            found[k] = cost.cut_at(np.sort(np.append(starts, more_cuts[: k - len(starts)])))
    return dict(sorted(found.items()))


def sample_counts(candidates: Sequence[int], *, limit: int) -> list[int]:
    """At most `limit` (at least 1) of the ascending candidates, both endpoints first.

    All where they fit. Otherwise the smaller half of the budget is the first candidates in
    sequence, and the rest is spread evenly, in rank, from there to the last; limit 1 keeps the
    first. (The paper gives the kinds of value but not their shares.)
    """
    if len(candidates) <= limit:
        return list(candidates)
    num_dense = max(1, limit // 2)
    num_sparse = limit - num_dense
    span = len(candidates) - num_dense
    sparse = [num_dense - 1 + span * step // num_sparse for step in range(1, num_sparse + 1)]
    return [candidates[rank] for rank in [*range(num_dense), *sparse]]


def _merged_starts(cost: PrefixCost, starts: Ints, capacity: int) -> dict[int, Ints]:
    """Starts after each merge, by the number of microbatches left.

    A pair that does not fit never will, for microbatches only grow: each cut is looked at once.
    """
    bounds = [*starts.tolist(), len(cost)]
    before = dict(zip(bounds[1:], bounds[:-1], strict=True))
    after = dict(pairwise(bounds))
    cuts = starts[1:]
    kept = np.ones(len(starts), np.bool_)
    merged: dict[int, Ints] = {}
    for rank in np.argsort(-cost.adjacent_lcp[cuts], kind="stable").tolist():
        cut = int(cuts[rank])
        left, right = before[cut], after[cut]
        if cost.interval(left, right) <= capacity:
            after[left], before[right] = right, left
            kept[rank + 1] = False
            merged[int(kept.sum())] = starts[kept]
    return merged


def _cheapest_cuts(cost: PrefixCost, starts: Ints) -> Ints:
    """Places that start no microbatch yet, cheapest cut first; parts of what fits always fit."""
    free = np.setdiff1d(np.arange(len(cost)), starts)
    return free[np.argsort(cost.adjacent_lcp[free], kind="stable")]
