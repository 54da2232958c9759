"""Repack a few microbatches at a time (ruin and recreate; beyond paper section 3.2).

Each step takes two to four microbatches that hold neighbouring trajectories, or are light, takes
all members out and puts them back by max-shared in descending lexicographic order from a drawn
start. In that order the rows computed twice are known as they arise, so most steps stop early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harts.plan.align import align_to_replicas
from harts.plan.cost import PrefixCost
from harts.plan.jit import HAVE_NUMBA, jit, kernel
from harts.plan.membership import partition_of
from harts.plan.partition import Partition
from harts.tree.order import Ints

MOST_REPACKED = 4
MOST_LIGHT = 2
LIGHTEST_OF = 7
DRAWS = 6


def search_memberships(
    cost: PrefixCost,
    partition: Partition,
    *,
    capacity: int,
    replicas: int,
    iterations: int = 10_000,
    seed: int = 1,
    use_numba: bool = HAVE_NUMBA,
) -> Partition:
    """A partition of less total work, or the one given; K may change by multiples of `replicas`.

    For four fifths of the steps a repacking may cost a little more (threshold accepting, from
    capacity / 20 rows down to none); then only fewer rows, or the same rows in fuller
    microbatches, count. Deterministic in the seed. About 40 insertions a step; numba and Python
    agree exactly.
    """
    num, num_microbatches = len(cost), len(partition.rows)
    if num_microbatches == 1 or not iterations:
        return partition
    draws = np.random.PCG64(seed).random_raw(DRAWS * iterations) >> 33
    tables: list[Any] = [
        draws.astype(np.int64),
        partition.microbatch_of_place.copy(),
        partition.rows.copy(),
        cost.lengths,
        cost.minima.ravel(),
        cost.level.astype(np.int64),
        np.full((5, num + 1), -1, np.int64),
        np.full((2, num_microbatches), -1, np.int64),
        np.zeros((5, MOST_REPACKED), np.int64),
    ]
    if not use_numba:  # Python reads lists several times faster than arrays
        tables = [table.tolist() for table in tables]
    repack: Callable[..., None] = kernel(_repack, use_numba=use_numba)
    repack(*tables, capacity, iterations)
    repacked = partition_of(cost, np.asarray(tables[1]))
    assert repacked.rows.sum() == sum(tables[2]), "rows kept while repacking are the exact rows"
    found = align_to_replicas(cost, repacked.microbatch_of_place, replicas=replicas)
    return found if found is not None and found.rows.sum() < partition.rows.sum() else partition


@jit
def _repack(
    draws: Ints,
    membership: Ints,
    rows: Ints,
    lengths: Ints,
    minima: Ints,
    level: Ints,
    per_place: Ints,
    per_microbatch: Ints,
    per_chosen: Ints,
    capacity: int,
    iterations: int,
) -> None:
    """All steps, in place; rows of a microbatch that was emptied are 0.

    per_place (5, N+1), per_microbatch (2, K) filled with -1 and per_chosen (5, MOST_REPACKED)
    are work space. minima is flat; min(adjacent_lcp[a+1 : b+1]) is read from two of its entries.
    """
    num, num_microbatches = len(membership), len(rows)
    after, places, shared, target = per_place[0], per_place[1], per_place[2], per_place[3]
    first, chosen_in = per_microbatch[0], per_microbatch[1]
    chosen, cursor, work = per_chosen[0], per_chosen[1], per_chosen[2]
    common, common_low = per_chosen[3], per_chosen[4]
    for place in range(num - 1, -1, -1):
        after[place] = first[membership[place]]
        first[membership[place]] = place
    for step in range(iterations):
        # choose: microbatches met on both sides of a place, then light ones
        at = DRAWS * step
        wanted = 2 + draws[at] % (MOST_REPACKED - 1)
        left = draws[at + 1] % num
        right = left + 1
        num_light = min(draws[at + 2] % (MOST_LIGHT + 1), wanted - 1)
        count = 0
        while count < wanted - num_light and (left >= 0 or right < num):
            if left >= 0:
                if chosen_in[membership[left]] != step:
                    chosen_in[membership[left]] = step
                    chosen[count] = membership[left]
                    count += 1
                left -= 1
            if right < num and count < wanted - num_light:
                if chosen_in[membership[right]] != step:
                    chosen_in[membership[right]] = step
                    chosen[count] = membership[right]
                    count += 1
                right += 1
        for draw in range(num_light):
            light = draws[at + 3 + draw] % num_microbatches
            for offset in range(1, LIGHTEST_OF):
                other = (light + offset) % num_microbatches
                if rows[light] == 0 or 0 < rows[other] < rows[light]:
                    light = other
            if chosen_in[light] != step and rows[light] > 0:
                chosen_in[light] = step
                chosen[count] = light
                count += 1
        # take out: members in ascending order, and the rows their trie would have
        spare = squares = 0
        for i in range(count):
            spare += rows[chosen[i]]
            squares += rows[chosen[i]] * rows[chosen[i]]
            cursor[i] = first[chosen[i]]
        size = 0
        while True:
            place, from_i = num, -1
            for i in range(count):
                if 0 <= cursor[i] < place:
                    place, from_i = cursor[i], i
            if from_i < 0:
                break
            cursor[from_i] = after[place]
            places[size] = place
            shared[size] = 0
            if size > 0:
                begin = places[size - 1]
                up = level[place - begin] * num
                width = 1 << level[place - begin]
                shared[size] = min(minima[up + begin + 1], minima[up + place - width + 1])
            spare -= lengths[place] - shared[size]
            size += 1
        # put back; `spare` rows were computed twice, so many may be again, and some more early on
        allowed = spare + max(0, capacity * (4 * iterations - 5 * step) // (80 * iterations))
        start = size - 1 if draws[at + 5] % 3 == 0 else draws[at + 5] // 3 % size
        opened = twice = 0
        complete = True
        for rank in range(size):
            i = (start - rank) % size
            place = places[i]
            most, low = 0, 0
            if rank > 0 and i < size - 1:
                most = shared[i + 1]
                for k in range(opened):
                    common[k] = min(common[k], most)
            elif rank > 0:
                for k in range(opened):
                    common[k] = 0
            if i > start:  # the members from `start` down are before this one
                begin = places[start]
                up, width = level[place - begin] * num, 1 << level[place - begin]
                low = min(minima[up + begin + 1], minima[up + place - width + 1])
                most = max(most, low)
            best, to = -1, opened
            for k in range(opened):
                both = max(common[k], min(common_low[k], low))
                if both > best and work[k] + lengths[place] - both <= capacity:
                    best, to = both, k
            if to == opened:
                if opened == count:
                    complete = False
                    break
                opened += 1
                best = work[to] = common_low[to] = 0
                if i < start:
                    begin, end = place, places[start]
                    up, width = level[end - begin] * num, 1 << level[end - begin]
                    common_low[to] = min(minima[up + begin + 1], minima[up + end - width + 1])
                elif i == start:
                    common_low[to] = lengths[place]
            work[to] += lengths[place] - best
            twice += most - best
            common[to] = lengths[place]
            target[i] = to
            if twice > allowed:
                complete = False
                break
        if complete and twice == spare:
            for k in range(opened):
                squares -= work[k] * work[k]
            complete = squares < 0
        if not complete:
            continue
        for k in range(count):
            first[chosen[k]] = -1
            rows[chosen[k]] = work[k] if k < opened else 0
        for i in range(size - 1, -1, -1):
            k = chosen[target[i]]
            membership[places[i]] = k
            after[places[i]] = first[k]
            first[k] = places[i]
