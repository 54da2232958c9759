"""Replica and slot of every microbatch with even replica totals (beyond paper section 3.2).

Sorted blocks of D minimise the sum of slot maxima: the maximum of the j-th heaviest slot is at
least the (1 + (j-1) D)-th heaviest microbatch, whatever the slots. Inside its slot a microbatch
may go to any replica, and that freedom evens the totals (third term of Equation 4).
"""

from __future__ import annotations

import numpy as np

from harts.plan.placement import Placement, place_greedily
from harts.tree.order import Ints


def place_evenly(rows: Ints, *, replicas: int) -> Placement:
    """Start from the paper's placement, then exchange between the heaviest replica and another
    in one or two slots, while the larger of the two totals falls.

    rows: int64 (K,), K a multiple of `replicas`. The first two terms of Equation 4 are those of
    `place_greedily`, the third never larger. Each exchange costs O(K + S log S) for S = K / D
    slots with one other replica; at most K of them.
    """
    start = place_greedily(rows, replicas=replicas)
    microbatch = np.empty((len(rows) // replicas, replicas), np.int64)
    microbatch[start.slot_of_microbatch, start.replica_of_microbatch] = np.arange(len(rows))
    work = rows[microbatch]
    for _ in range(len(rows)):
        if not _relieve_heaviest(work, microbatch):
            break
    replica, slot = np.empty_like(start.replica_of_microbatch), start.slot_of_microbatch
    replica[microbatch] = np.arange(replicas)
    return Placement(replica, slot)


def _relieve_heaviest(work: Ints, microbatch: Ints) -> bool:
    """Apply the best exchange of the heaviest replica, in place; False where none helps.

    work, microbatch: int64 (S, D). With `gap` between two totals, moving 0 < d < gap rows leaves
    both below the larger, and d = gap / 2 evens them.
    """
    totals = work.sum(axis=0)
    heavy = int(totals.argmax())
    best: tuple[int, int, list[int]] | None = None
    for light in np.argsort(totals, kind="stable").tolist():
        gap = int(totals[heavy] - totals[light])
        if best is not None and totals[light] + gap // 2 >= best[0]:
            break  # no replica from here on can leave a smaller larger total
        moved, slots = _closest_to_half(work[:, heavy] - work[:, light], gap)
        larger = int(max(totals[heavy] - moved, totals[light] + moved))
        if 0 < moved < gap and (best is None or larger < best[0]):
            best = (larger, light, slots)
    if best is None:
        return False
    _, light, slots = best
    for table in (work, microbatch):
        table[slots, heavy], table[slots, light] = table[slots, light], table[slots, heavy]
    return True


def _closest_to_half(differences: Ints, gap: int) -> tuple[int, list[int]]:
    """Sum of one or two differences (S,) that is closest to gap / 2, and where they are."""
    one = int(np.abs(2 * differences - gap).argmin())
    best, slots = int(differences[one]), [one]
    if len(differences) > 1:
        ranked = np.argsort(differences, kind="stable")
        ascending = differences[ranked]
        # the best partner of each is one of the two values around gap / 2 - itself
        above = np.searchsorted(2 * ascending, gap - 2 * ascending)
        rank = np.tile(np.arange(len(ranked)), 2)
        partner = np.clip(np.append(above - 1, above), 0, len(ranked) - 1)
        miss = np.abs(2 * (ascending[rank] + ascending[partner]) - gap)
        miss[rank == partner] = np.iinfo(np.int64).max
        pair = int(miss.argmin())
        if miss[pair] < abs(2 * best - gap):
            best = int(ascending[rank[pair]] + ascending[partner[pair]])
            slots = [int(ranked[rank[pair]]), int(ranked[partner[pair]])]
    return best, slots
