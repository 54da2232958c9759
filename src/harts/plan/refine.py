"""Move the cuts of a contiguous partition a few places (paper section 3.2, boundary refinement)."""

from __future__ import annotations

import numpy as np

from harts.plan.cost import PrefixCost
from harts.plan.jit import HAVE_NUMBA, jit, kernel
from harts.plan.partition import Partition
from harts.tree.order import Ints


def refine_boundaries(
    cost: PrefixCost,
    partition: Partition,
    *,
    capacity: int,
    neighbourhood: int = 8,
    sweeps: int = 2,
    use_numba: bool = HAVE_NUMBA,
) -> Partition:
    """Each cut takes the place within `neighbourhood` where its two microbatches have least
    work in all, then the lighter maximum.

    The partition must be contiguous. K stays, microbatches stay non-empty and within the
    capacity; ties keep the cut, then go left. Stops after a sweep without a change.
    O(K neighbourhood) a sweep.
    """
    starts = np.flatnonzero(np.diff(partition.microbatch_of_place, prepend=-1))
    move_cuts = kernel(_move_cuts, use_numba=use_numba)
    for _ in range(sweeps):
        if not move_cuts(starts, cost.rows_before, cost.adjacent_lcp, capacity, neighbourhood):
            break
    return cost.cut_at(starts)


@jit
def _move_cuts(
    starts: Ints, rows_before: Ints, adjacent_lcp: Ints, capacity: int, neighbourhood: int
) -> bool:
    """One sweep over the cuts from left to right, in place; whether any of them moved."""
    changed = False
    for index in range(1, len(starts)):
        begin, cut = starts[index - 1], starts[index]
        end = starts[index + 1] if index + 1 < len(starts) else len(adjacent_lcp)
        # the two sides add up to the work of both plus adjacent_lcp at the cut (Equation 6)
        both = rows_before[end] - rows_before[begin] + adjacent_lcp[begin]
        best, best_shared = cut, adjacent_lcp[cut]
        left = rows_before[cut] - rows_before[begin] + adjacent_lcp[begin]
        best_heavier = max(left, both + best_shared - left)
        first, last = max(begin + 1, cut - neighbourhood), min(end - 1, cut + neighbourhood)
        for place in range(first, last + 1):
            shared = adjacent_lcp[place]
            left = rows_before[place] - rows_before[begin] + adjacent_lcp[begin]
            heavier = max(left, both + shared - left)
            if heavier > capacity or shared > best_shared:
                continue
            if shared < best_shared or heavier < best_heavier:
                best, best_shared, best_heavier = place, shared, heavier
        changed = changed or best != cut
        starts[index] = best
    return changed
