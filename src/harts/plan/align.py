"""Make the number of microbatches a multiple of the replicas (paper section 3.2, greedy plans).

A trajectory that leaves for a microbatch of its own costs the rows it shared with the others.
"""

from __future__ import annotations

import numpy as np

from harts.plan.cost import PrefixCost
from harts.plan.membership import most_shared, neighbours, partition_of
from harts.plan.partition import Partition
from harts.tree.order import Ints


def align_to_replicas(
    cost: PrefixCost, microbatch_of_place: Ints, *, replicas: int
) -> Partition | None:
    """Split off single trajectories, each time the cheapest, until K is a multiple of replicas.

    microbatch_of_place: int64 (N,), any ids. Ties at the leftmost place. None where fewer than
    that many trajectories exist. At most replicas - 1 splits, each O(N log N).
    """
    partition = partition_of(cost, microbatch_of_place)
    num_microbatches = len(partition.rows)
    missing = -num_microbatches % replicas
    if not missing:
        return partition
    if num_microbatches + missing > len(cost):
        return None
    membership = partition.microbatch_of_place.copy()
    places = np.arange(len(cost))
    for new in range(num_microbatches, num_microbatches + missing):
        before, after = neighbours(membership)
        price = most_shared(cost, places, before, after)
        together = np.flatnonzero((before >= 0) | (after >= 0))
        membership[together[np.argmin(price[together])]] = new
    return partition_of(cost, membership)
