"""The natural partition and the range of K to search (paper section 3.2, Equations 7 and 8).

Intervals that exceed the capacity are split where neighbours share least, until all fit: cutting
at place t costs exactly adjacent_lcp[t] more rows (Equation 6), so shallow forks are cut first.
"""

from __future__ import annotations

import numpy as np

from harts.plan.cost import PrefixCost
from harts.plan.partition import Partition


def natural_partition(cost: PrefixCost, *, capacity: int) -> Partition:
    """Split every interval above `capacity` at its lowest adjacent LCP until none is left.

    Ties: the smaller work of the larger side, then the leftmost place. (The paper's next tie,
    the smaller difference of the sides, never decides: at equal LCP the sides have equal sums.)
    Every trajectory must fit the capacity. O(N) for each of the K_0 - 1 splits.
    """
    starts: list[int] = []
    todo = [(0, len(cost))]
    while todo:
        begin, end = todo.pop()
        if end - begin == 1 or cost.interval(begin, end) <= capacity:
            starts.append(begin)
            continue
        cut = _lowest_valley(cost, begin, end)
        todo += [(cut, end), (begin, cut)]  # the left side first, so starts ascend
    return cost.cut_at(starts)


def candidate_range(
    cost: PrefixCost, num_natural: int, *, capacity: int, replicas: int
) -> list[int]:
    """K_min, K_min + D, ..., K_max: numbers of microbatches for the base search.

    num_natural: K_0 of the natural partition. K_min is a bound by total work alone, so the list
    may hold counts that no partition reaches, and counts above N when N < D.
    """
    smallest = replicas * max(1, _ceil_div(cost.total, capacity * replicas))
    aligned = replicas * _ceil_div(num_natural, replicas)
    largest = max(smallest, min(aligned, replicas * (len(cost) // replicas)))
    return list(range(smallest, largest + 1, replicas))


def _lowest_valley(cost: PrefixCost, begin: int, end: int) -> int:
    inner = cost.adjacent_lcp[begin + 1 : end]
    lowest = begin + 1 + np.flatnonzero(inner == inner.min())
    larger = np.maximum(cost.interval(begin, lowest), cost.interval(lowest, end))
    return int(lowest[np.argmin(larger)])


def _ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)
