"""Exact rows of any membership, and what each trajectory shares inside its microbatch.

Between its neighbours p < x < q in a microbatch, LCP(p, q) is the smaller of LCP(p, x) and
LCP(x, q), so Equation 10 says: x adds its length minus the most rows it shares with any member.
"""

from __future__ import annotations

import numpy as np

from harts.plan.cost import PrefixCost
from harts.plan.partition import Partition
from harts.tree.order import Ints


def partition_of(cost: PrefixCost, microbatch_of_place: Ints) -> Partition:
    """The partition with any microbatch ids (N,) renumbered by their first place. O(N log N)."""
    _, first, label = np.unique(microbatch_of_place, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    membership = rank[label.reshape(-1)]
    before, _ = neighbours(membership)
    here = np.arange(len(cost))
    shared = np.where(before >= 0, cost.lcp(np.where(before >= 0, before, here), here), 0)
    rows = np.zeros(len(first), np.int64)
    np.add.at(rows, membership, cost.lengths - shared)
    return Partition(membership, rows)


def neighbours(microbatch_of_place: Ints) -> tuple[Ints, Ints]:
    """int64 (N,) twice: the place before and after in the same microbatch, -1 for none."""
    grouped = np.argsort(microbatch_of_place, kind="stable")
    together = microbatch_of_place[grouped[1:]] == microbatch_of_place[grouped[:-1]]
    before = np.full(len(grouped), -1, np.int64)
    after = before.copy()
    before[grouped[1:][together]] = grouped[:-1][together]
    after[grouped[:-1][together]] = grouped[1:][together]
    return before, after


def most_shared(cost: PrefixCost, places: Ints, before: Ints, after: Ints) -> Ints:
    """Rows that each place shares with a microbatch, from its neighbours there (-1 for none)."""
    left = np.where(before >= 0, cost.lcp(np.where(before >= 0, before, places), places), 0)
    right = np.where(after >= 0, cost.lcp(places, np.where(after >= 0, after, places)), 0)
    return np.maximum(left, right)
