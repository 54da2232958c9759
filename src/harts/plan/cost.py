"""Compact work in constant time: intervals, common prefixes, insertions (Equations 5, 6, 10).

A trajectory is named by its place in lexicographic order. Its new rows after its predecessor sum
to the work of an interval, and the rows that two places share are the least adjacent LCP between
them, found in a sparse table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts.plan.jit import jit
from harts.plan.partition import Partition
from harts.tree.order import Ints, TrajectoryOrder

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PrefixCost:
    """Work of places 0..N-1 of an order; the arrays are for compiled loops too.

    lengths: int64 (N,), rows of each trajectory. adjacent_lcp: int64 (N,), rows shared with the
    place before, 0 at place 0. rows_before: int64 (N+1,), rows of the trie of the first n places.
    minima: int64 (levels, N), minima[l, i] = min(adjacent_lcp[i : i + 2**l]), cut off at N.
    level: int32 (N+1,), level[n] = floor(log2(n)), 0 for 0.
    """

    lengths: Ints
    adjacent_lcp: Ints
    rows_before: Ints
    minima: Ints
    level: Int32s

    @classmethod
    def of(cls, order: TrajectoryOrder) -> PrefixCost:
        """O(N log N) time and memory."""
        num = len(order.ids)
        rows_before = np.zeros(num + 1, np.int64)
        np.cumsum(order.new_rows, out=rows_before[1:])
        level = np.zeros(num + 1, np.int32)
        level[1:] = np.frexp(np.arange(1, num + 1))[1] - 1
        minima = np.empty((int(level[num]) + 1, num), np.int64)
        minima[0] = order.lcp
        for above in range(1, len(minima)):
            width = 1 << (above - 1)
            minima[above] = minima[above - 1]
            np.minimum(
                minima[above - 1, :-width], minima[above - 1, width:], out=minima[above, :-width]
            )
        return cls(order.lengths, order.lcp, rows_before, minima, level)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        """Rows if everything were one microbatch: G of Equation 7."""
        return int(self.rows_before[-1])

    def interval(self, begin: npt.ArrayLike, end: npt.ArrayLike) -> Ints:
        """Work W of the non-empty intervals of places [begin, end); broadcasts. O(1) each."""
        begin, end = np.asarray(begin), np.asarray(end)
        work: Ints = self.rows_before[end] - self.rows_before[begin] + self.adjacent_lcp[begin]
        return work

    def lcp(self, one: npt.ArrayLike, other: npt.ArrayLike) -> Ints:
        """Rows that two places share, their length where they are equal; broadcasts. O(1) each."""
        first, last = np.minimum(one, other), np.maximum(one, other)
        same = first == last
        level = self.level[last - first]
        # where both are one place the range is empty, and any index in bounds will do
        begin, end = np.where(same, first, first + 1), np.where(same, last, last - (1 << level) + 1)
        shared = np.minimum(self.minima[level, begin], self.minima[level, end])
        return np.where(same, self.lengths[first], shared)

    def insertion(self, place: npt.ArrayLike, before: npt.ArrayLike, after: npt.ArrayLike) -> Ints:
        """Rows that `place` adds between its neighbours in a microbatch, -1 for no neighbour.

        Equation 10; broadcasts. Taking `place` out again saves the same rows. O(1) each.
        """
        place, before, after = np.asarray(place), np.asarray(before), np.asarray(after)
        has_before, has_after = before >= 0, after >= 0
        left, right = np.where(has_before, before, place), np.where(has_after, after, place)
        shared = np.where(has_before, self.lcp(left, place), 0)
        shared = shared + np.where(has_after, self.lcp(place, right), 0)
        bridged = np.where(has_before & has_after, self.lcp(left, right), 0)
        return np.asarray(self.lengths[place] - shared + bridged)

    def rows_of(self, places: npt.ArrayLike) -> int:
        """Work of any set of places, given ascending (k,). Equation 5, O(k)."""
        places = np.asarray(places, np.int64)
        return int(self.lengths[places].sum() - self.lcp(places[:-1], places[1:]).sum())

    def cut_at(self, starts: npt.ArrayLike) -> Partition:
        """The contiguous partition whose microbatches start at `starts` (K,), ascending from 0."""
        starts = np.asarray(starts, np.int64)
        ends = np.append(starts[1:], len(self))
        return Partition(
            np.repeat(np.arange(len(starts), dtype=np.int64), ends - starts),
            self.interval(starts, ends),
        )


@jit
def shared_rows(lengths: Ints, minima: Ints, level: Int32s, one: int, other: int) -> int:
    """`PrefixCost.lcp` of two places, for compiled loops."""
    if one == other:
        return lengths[one]  # type: ignore[no-any-return]
    first, last = min(one, other), max(one, other)
    up = level[last - first]
    return min(minima[up, first + 1], minima[up, last - (1 << up) + 1])  # type: ignore[no-any-return]


@jit
def inserted_rows(
    lengths: Ints, minima: Ints, level: Int32s, place: int, before: int, after: int
) -> int:
    """`PrefixCost.insertion` of one place, for compiled loops."""
    added = lengths[place]
    if before >= 0:
        added -= shared_rows(lengths, minima, level, before, place)
    if after >= 0:
        added -= shared_rows(lengths, minima, level, place, after)
    if before >= 0 and after >= 0:
        added += shared_rows(lengths, minima, level, before, after)
    return added  # type: ignore[no-any-return]
