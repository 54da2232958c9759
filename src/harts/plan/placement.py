"""Replica and slot of every microbatch (paper section 3.2, 'DP-replica assignment')."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harts.tree.order import Ints


@dataclass(frozen=True)
class Placement:
    """replica_of_microbatch, slot_of_microbatch: int64 (K,); every slot holds one per replica."""

    replica_of_microbatch: Ints
    slot_of_microbatch: Ints


def place_greedily(rows: Ints, *, replicas: int) -> Placement:
    """Group microbatches of similar work into slots, heaviest first; inside a slot the heavier
    goes to the replica with less work so far.

    rows: int64 (K,), K a multiple of `replicas`. O(K log K).
    """
    by_work = np.argsort(-rows, kind="stable")
    replica = np.empty(len(rows), np.int64)
    slot = np.empty(len(rows), np.int64)
    load = np.zeros(replicas, np.int64)
    for index in range(len(rows) // replicas):
        members = by_work[index * replicas : (index + 1) * replicas]
        least_loaded = np.argsort(load, kind="stable")
        replica[members] = least_loaded
        slot[members] = index
        load[least_loaded] += rows[members]
    return Placement(replica, slot)
