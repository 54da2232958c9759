"""Exchange runs of trajectories until the microbatches of a slot are even (second term of Eq. 4).

Subtrees that hang from a prefix which two microbatches both hold may change sides without costing
a row, so total work leaves much freedom. Each step draws two or three microbatches of similar
work, cuts their members into such runs, and tries a few distributions of them. Beyond the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harts.plan.cost import PrefixCost
from harts.plan.jit import HAVE_NUMBA, jit, kernel
from harts.plan.partition import Partition
from harts.tree.order import Ints

MOST_CHOSEN = 3
NEARBY_RANKS = 8
TRIALS = 8
DRAWS = 5


def balance_slots(
    cost: PrefixCost,
    partition: Partition,
    *,
    capacity: int,
    replicas: int,
    iterations: int = 4_000,
    seed: int = 1,
    use_numba: bool = HAVE_NUMBA,
) -> Partition:
    """Same K, and less total work, or the same and a smaller sum of slot maxima.

    Slots are the sorted blocks of `replicas` microbatches. Deterministic in the seed; numba and
    Python agree exactly. A step reads the members of its microbatches once, then costs O(K) for
    each of the TRIALS distributions that keep the total.
    """
    num, num_microbatches = len(cost), len(partition.rows)
    if num_microbatches < 2 or not iterations:
        return partition
    draws = np.random.PCG64(seed).random_raw(DRAWS * iterations) >> 33
    tables: list[Any] = [
        draws.astype(np.int64),
        partition.microbatch_of_place.copy(),
        partition.rows.copy(),
        np.argsort(-partition.rows, kind="stable"),
        cost.lengths,
        cost.minima.ravel(),
        cost.level.astype(np.int64),
        np.full((6, num + 1), -1, np.int64),
        np.full((2, num_microbatches), -1, np.int64),
        np.zeros((5, MOST_CHOSEN), np.int64),
    ]
    if not use_numba:  # Python reads lists several times faster than arrays
        tables = [table.tolist() for table in tables]
    exchange: Callable[..., None] = kernel(_exchange, use_numba=use_numba)
    exchange(*tables, capacity, replicas, iterations)
    return Partition(np.asarray(tables[1], np.int64), np.asarray(tables[2], np.int64))


@jit
def _exchange(
    draws: Ints,
    membership: Ints,
    rows: Ints,
    ranked: Ints,
    lengths: Ints,
    minima: Ints,
    level: Ints,
    per_place: Ints,
    per_microbatch: Ints,
    per_chosen: Ints,
    capacity: int,
    replicas: int,
    iterations: int,
) -> None:
    """All steps, in place. ranked (K,): microbatches by falling rows.

    per_place (6, N+1), per_microbatch (2, K) filled with -1 and per_chosen (5, MOST_CHOSEN) are
    work space. minima is flat; min(adjacent_lcp[a+1 : b+1]) is read from two of its entries.
    """
    num, num_microbatches = len(membership), len(rows)
    after, places, run_of = per_place[0], per_place[1], per_place[2]
    cut, run_rows, target = per_place[3], per_place[4], per_place[5]
    first, chosen_in = per_microbatch[0], per_microbatch[1]
    chosen, cursor, work = per_chosen[0], per_chosen[1], per_chosen[2]
    common, heaviest = per_chosen[3], per_chosen[4]
    for place in range(num - 1, -1, -1):
        after[place] = first[membership[place]]
        first[membership[place]] = place
    slot_sum = 0
    for rank in range(0, num_microbatches, replicas):
        slot_sum += rows[ranked[rank]]
    for step in range(iterations):
        # choose: one of any rank, then others of a similar or of any rank
        at = DRAWS * step
        rank = draws[at] % num_microbatches
        count = 0
        for pick in range(2 + draws[at + 1] % (MOST_CHOSEN - 1)):
            k = ranked[rank]
            if pick > 0 and draws[at + 1 + pick] % 4 == 0:
                k = draws[at + 1 + pick] // 4 % num_microbatches
            elif pick > 0:
                near = draws[at + 1 + pick] // 4 % (2 * NEARBY_RANKS + 1) - NEARBY_RANKS
                k = ranked[min(num_microbatches - 1, max(0, rank + near))]
            if chosen_in[k] != step:
                chosen_in[k] = step
                chosen[count] = k
                count += 1
        if count < 2:
            continue
        # take out: members in ascending order, and the rows their trie would have
        spare = 0
        for i in range(count):
            spare += rows[chosen[i]]
            cursor[i] = first[chosen[i]]
        size = deepest = 0
        while True:
            place, from_i = num, -1
            for i in range(count):
                if 0 <= cursor[i] < place:
                    place, from_i = cursor[i], i
            if from_i < 0:
                break
            cursor[from_i] = after[place]
            places[size] = place
            cut[size] = 0
            if size > 0:
                begin = places[size - 1]
                up, width = level[place - begin] * num, 1 << level[place - begin]
                cut[size] = min(minima[up + begin + 1], minima[up + place - width + 1])
                if membership[begin] != membership[place]:
                    deepest = max(deepest, cut[size])
            spare -= lengths[place] - cut[size]
            size += 1
        # neighbours that share more than any two members of different microbatches stay together
        runs = 0
        for i in range(size):
            added = lengths[places[i]]
            if i > 0 and cut[i] > deepest:
                run_rows[runs - 1] += added - cut[i]
            else:
                cut[runs] = cut[i]
                run_rows[runs] = added
                runs += 1
            run_of[i] = runs - 1
        state = 1 + draws[at + 4] % 2147483646
        for _ in range(TRIALS):
            opened = twice = 0
            for run in range(runs - 1, -1, -1):
                most = cut[run + 1] if run < runs - 1 else 0
                best, to, ties = -1, -1, 0
                for k in range(opened):
                    common[k] = min(common[k], most)
                    if work[k] + run_rows[run] - common[k] <= capacity and common[k] >= best:
                        state = state * 48271 % 2147483647
                        ties = ties + 1 if common[k] == best else 1
                        if state % ties == 0:
                            to = k
                        best = common[k]
                if opened < count:
                    state = state * 48271 % 2147483647
                    if best <= 0 or (twice + most <= spare and state % 3 == 0):
                        to = opened
                        opened += 1
                        best = work[to] = 0
                if to < 0:
                    twice = spare + 1
                    break
                work[to] += run_rows[run] - best
                twice += most - best
                common[to] = run_rows[run]
                target[run] = to
                if twice > spare:
                    break
            if twice > spare or opened < count:
                continue
            # the sum of slot maxima with the new rows merged into the ranking
            for k in range(count):
                heaviest[k] = work[k]
            for i in range(1, count):
                for k in range(count - i):
                    if heaviest[k] < heaviest[k + 1]:
                        heaviest[k], heaviest[k + 1] = heaviest[k + 1], heaviest[k]
            new_sum = rank = merged = 0
            for k in ranked:
                if chosen_in[k] == step:
                    continue
                while merged < count and heaviest[merged] >= rows[k]:
                    if rank % replicas == 0:
                        new_sum += heaviest[merged]
                    merged += 1
                    rank += 1
                if rank % replicas == 0:
                    new_sum += rows[k]
                rank += 1
            while merged < count:
                if rank % replicas == 0:
                    new_sum += heaviest[merged]
                merged += 1
                rank += 1
            if twice == spare and new_sum >= slot_sum:
                continue
            slot_sum = new_sum
            for k in range(count):
                first[chosen[k]] = -1
                rows[chosen[k]] = work[k]
            for i in range(size - 1, -1, -1):
                k = chosen[target[run_of[i]]]
                membership[places[i]] = k
                after[places[i]] = first[k]
                first[k] = places[i]
            for rank in range(1, num_microbatches):
                k = ranked[rank]
                while rank > 0 and rows[ranked[rank - 1]] < rows[k]:
                    ranked[rank] = ranked[rank - 1]
                    rank -= 1
                ranked[rank] = k
            break
