"""A few single moves and swaps between microbatches (paper section 3.2, sparse repair)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harts.plan.cost import PrefixCost
from harts.plan.membership import most_shared, neighbours
from harts.plan.partition import Partition
from harts.tree.order import Ints


def repair_memberships(
    cost: PrefixCost,
    partition: Partition,
    *,
    capacity: int,
    neighbourhood: int = 8,
    iterations: int = 4,
) -> Partition:
    """Each iteration applies the best single move, or the best swap where no move helps.

    A move takes a trajectory into a microbatch that has a member within `neighbourhood` places
    of it; a swap exchanges two that close. Only strict decreases of the work of the two
    microbatches count; ties at the leftmost place. K stays, microbatches stay non-empty and
    within the capacity. O(N neighbourhood log N) an iteration.
    """
    for _ in range(iterations):
        members = _Members.of(cost, partition)
        better = _best_move(cost, partition, members, capacity, neighbourhood)
        better = better or _best_swap(cost, partition, members, capacity, neighbourhood)
        if better is None:
            break
        partition = better
    return partition


@dataclass(frozen=True)
class _Members:
    """Neighbours of every place in its own microbatch, and a way to find them in any other.

    before, after: int64 (N,), -1 for none. own: int64 (N,), rows shared with the own microbatch.
    places, keys: int64 (N,), places by microbatch, and microbatch * N + place, ascending.
    """

    before: Ints
    after: Ints
    own: Ints
    places: Ints
    keys: Ints

    @classmethod
    def of(cls, cost: PrefixCost, partition: Partition) -> _Members:
        membership = partition.microbatch_of_place
        before, after = neighbours(membership)
        own = most_shared(cost, np.arange(len(cost)), before, after)
        places = np.argsort(membership, kind="stable")
        return cls(before, after, own, places, membership[places] * len(cost) + places)

    def around(self, places: Ints, microbatches: Ints) -> tuple[Ints, Ints]:
        """Nearest member before and after each place in a microbatch that is not its own."""
        num = len(self.keys)
        found = np.searchsorted(self.keys, microbatches * num + places)
        inside = microbatches * num <= self.keys[found - 1]
        before = np.where((found > 0) & inside, self.places[found - 1], -1)
        at = np.minimum(found, num - 1)
        inside = self.keys[at] < (microbatches + 1) * num
        return before, np.where((found < num) & inside, self.places[at], -1)


def _best_move(
    cost: PrefixCost, partition: Partition, members: _Members, capacity: int, neighbourhood: int
) -> Partition | None:
    membership, rows = partition.microbatch_of_place, partition.rows
    num = len(rows)
    place, other = _pairs(membership, neighbourhood)
    place, other = np.append(place, other), np.append(other, place)
    alone = (members.before < 0) & (members.after < 0)
    choices = np.unique((place * num + membership[other])[~alone[place]])
    place, target = choices // num, choices % num
    shared = most_shared(cost, place, *members.around(place, target))
    saved = shared - members.own[place]
    fits = rows[target] + cost.lengths[place] - shared <= capacity
    best = _best(saved, fits)
    if best is None:
        return None
    x, length = place[best], cost.lengths[place[best]]
    membership, rows = membership.copy(), rows.copy()
    rows[membership[x]] -= length - members.own[x]
    rows[target[best]] += length - shared[best]
    membership[x] = target[best]
    return Partition(membership, rows)


def _best_swap(
    cost: PrefixCost, partition: Partition, members: _Members, capacity: int, neighbourhood: int
) -> Partition | None:
    membership, rows = partition.microbatch_of_place, partition.rows
    x, y = _pairs(membership, neighbourhood)
    of_x, of_y = membership[x], membership[y]
    # x comes before y, so y can only be the next member after x, and x the one before y
    before, after = members.around(x, of_y)
    x_shared = most_shared(cost, x, before, np.where(after == y, members.after[y], after))
    before, after = members.around(y, of_x)
    y_shared = most_shared(cost, y, np.where(before == x, members.before[x], before), after)
    x_rows = rows[of_x] - (cost.lengths[x] - members.own[x]) + cost.lengths[y] - y_shared
    y_rows = rows[of_y] - (cost.lengths[y] - members.own[y]) + cost.lengths[x] - x_shared
    saved = rows[of_x] + rows[of_y] - x_rows - y_rows
    best = _best(saved, np.maximum(x_rows, y_rows) <= capacity)
    if best is None:
        return None
    membership, rows = membership.copy(), rows.copy()
    rows[of_x[best]], rows[of_y[best]] = x_rows[best], y_rows[best]
    membership[x[best]], membership[y[best]] = of_y[best], of_x[best]
    return Partition(membership, rows)


def _pairs(membership: Ints, neighbourhood: int) -> tuple[Ints, Ints]:
    """All x < y at most `neighbourhood` apart in different microbatches, by x, then y."""
    num = len(membership)
    x = np.repeat(np.arange(num), neighbourhood)
    y = x + np.tile(np.arange(1, neighbourhood + 1), num)
    x, y = x[y < num], y[y < num]
    apart = membership[x] != membership[y]
    return x[apart], y[apart]


def _best(saved: Ints, fits: np.typing.NDArray[np.bool_]) -> int | None:
    """The first index of the largest positive saving that fits."""
    value = np.where(fits, saved, 0)
    best = int(value.argmax()) if len(value) else -1
    return best if best >= 0 and value[best] > 0 else None
