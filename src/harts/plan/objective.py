"""How plans are ranked: total work, then slot-critical work, then the heaviest replica (Eq. 4)."""

from __future__ import annotations

import numpy as np

from harts.plan.placement import Placement
from harts.tree.order import Ints

Objective = tuple[int, int, int]


def plan_objective(rows: Ints, placement: Placement) -> Objective:
    """J of Equation 4, smaller is better. rows: int64 (K,), K slots times replicas."""
    replicas = int(placement.replica_of_microbatch.max()) + 1
    work = np.zeros((len(rows) // replicas, replicas), np.int64)
    work[placement.slot_of_microbatch, placement.replica_of_microbatch] = rows
    return int(rows.sum()), int(work.max(axis=1).sum()), int(work.sum(axis=0).max())
