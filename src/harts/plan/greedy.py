"""Trie-aware greedy plans, straight from the trajectories (paper section 3.2, Equation 10).

Four processing orders times two policies, over memberships that need not be contiguous. With
shared[k, x] the most rows that x shares with a member of microbatch k, putting x into k adds
len(x) - shared[k, x] rows; a new member changes only the entries up to its neighbours there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from harts.plan.align import align_to_replicas
from harts.plan.cost import PrefixCost
from harts.plan.jit import HAVE_NUMBA, jit, kernel
from harts.plan.partition import Partition
from harts.tree.order import Ints

Bools = npt.NDArray[np.bool_]
Dissolve = Callable[[int, Ints, Ints, Bools, Ints, Ints, int], bool]


def greedy_candidate(
    cost: PrefixCost, *, capacity: int, replicas: int, use_numba: bool = HAVE_NUMBA
) -> Partition | None:
    """The plan with fewest microbatches, then least work, of `greedy_plans`; None without any."""
    plans = greedy_plans(cost, capacity=capacity, replicas=replicas, use_numba=use_numba)
    return min(plans, key=lambda plan: (len(plan.rows), int(plan.rows.sum())), default=None)


def greedy_plans(
    cost: PrefixCost, *, capacity: int, replicas: int, use_numba: bool = HAVE_NUMBA
) -> list[Partition]:
    """Up to eight plans, K a multiple of `replicas`, after removal of small microbatches.

    Best-fit takes the microbatch with most work after the insertion, max-shared the one that
    shares most; ties go to the one opened first, and a new one opens where none has room. Plans
    that cannot be aligned are left out. Every trajectory must fit the capacity.
    O(N (N + K)) time each, O(N K) memory; numba and numpy agree exactly.
    """
    fill = kernel(_fill, use_numba=True) if use_numba else _fill_by_rows
    dissolve = kernel(_dissolve, use_numba=True) if use_numba else _dissolve_by_rows
    plans = []
    for processing in _processing_orders(cost):
        for best_fit in (True, False):
            membership, rows = fill(processing, cost.adjacent_lcp, cost.lengths, capacity, best_fit)
            _remove_small(cost, membership, rows, capacity, dissolve)
            plans.append(align_to_replicas(cost, membership, replicas=replicas))
    return [plan for plan in plans if plan is not None]


def _processing_orders(cost: PrefixCost) -> Iterator[Ints]:
    """Lexicographic up and down, by length, by unique suffix; ties in lexicographic order."""
    yield np.arange(len(cost))
    yield np.arange(len(cost))[::-1].copy()
    yield np.argsort(-cost.lengths, kind="stable")
    shared_after = np.append(cost.adjacent_lcp[1:], 0)
    yield np.argsort(np.maximum(cost.adjacent_lcp, shared_after) - cost.lengths, kind="stable")


def _remove_small(
    cost: PrefixCost, membership: Ints, rows: Ints, capacity: int, dissolve: Dissolve
) -> None:
    """Dissolve each microbatch, lightest first, whose members all fit elsewhere; in place.

    Members leave in lexicographic order for the microbatch that shares most with them and has
    room, as if by max-shared; a microbatch that only some can leave stays as it was.
    """
    alive = np.ones(len(rows), np.bool_)
    for k in np.argsort(rows, kind="stable").tolist():
        alive[k] = False
        alive[k] = not dissolve(
            k, membership, rows, alive, cost.adjacent_lcp, cost.lengths, capacity
        )


@jit
def _dissolve(
    k: int,
    membership: Ints,
    rows: Ints,
    alive: Bools,
    adjacent_lcp: Ints,
    lengths: Ints,
    capacity: int,
) -> bool:
    """Move all members of k into microbatches that are alive, in place; or nothing, and False."""
    members = np.flatnonzero(membership == k)
    trial, work = membership.copy(), rows.copy()
    trial[members] = -1
    for place in members:
        shared = _shared_with_each(int(place), trial, adjacent_lcp, len(rows))
        best, target = -1, -1
        for other in range(len(rows)):
            fits = work[other] + lengths[place] - shared[other] <= capacity
            if fits and alive[other] and shared[other] > best:
                best, target = shared[other], other
        if target < 0:
            return False
        trial[place] = target
        work[target] += lengths[place] - best
    membership[:], rows[:] = trial, work
    rows[k] = 0
    return True


def _dissolve_by_rows(
    k: int,
    membership: Ints,
    rows: Ints,
    alive: Bools,
    adjacent_lcp: Ints,
    lengths: Ints,
    capacity: int,
) -> bool:
    """`_dissolve` in numpy."""
    members = np.flatnonzero(membership == k)
    trial, work = membership.copy(), rows.copy()
    trial[members] = -1
    for place in members.tolist():
        shared = np.zeros(len(rows) + 1, np.int64)  # the last entry takes what is nowhere
        np.maximum.at(shared, trial, _shared_with_places(place, adjacent_lcp))
        after = work + lengths[place] - shared[:-1]
        score = np.where(alive & (after <= capacity), shared[:-1], -1)
        target = int(score.argmax())
        if score[target] < 0:
            return False
        trial[place], work[target] = target, after[target]
    membership[:], rows[:] = trial, work
    rows[k] = 0
    return True


@jit
def _shared_with_each(place: int, membership: Ints, adjacent_lcp: Ints, num: int) -> Ints:
    """int64 (num,): most rows that `place` shares with a member of each microbatch.

    Members of microbatch -1 are nowhere. O(N).
    """
    shared = np.zeros(num, np.int64)
    common = adjacent_lcp[place]
    for other in range(place - 1, -1, -1):
        k = membership[other]
        if k >= 0 and common > shared[k]:
            shared[k] = common
        common = min(common, adjacent_lcp[other])
    if place + 1 < len(membership):
        common = adjacent_lcp[place + 1]
        for other in range(place + 1, len(membership)):
            common = min(common, adjacent_lcp[other])
            k = membership[other]
            if k >= 0 and common > shared[k]:
                shared[k] = common
    return shared


def _shared_with_places(place: int, adjacent_lcp: Ints) -> Ints:
    """int64 (N,): rows that `place` shares with every other place, 0 at its own."""
    common = np.zeros(len(adjacent_lcp), np.int64)
    common[:place] = np.minimum.accumulate(adjacent_lcp[place:0:-1])[::-1]
    common[place + 1 :] = np.minimum.accumulate(adjacent_lcp[place + 1 :])
    return common


@jit
def _fill(
    processing: Ints, adjacent_lcp: Ints, lengths: Ints, capacity: int, best_fit: bool
) -> tuple[Ints, Ints]:
    """Membership (N,) and rows (K,) after inserting every place in the given order."""
    num, opened = len(processing), 0
    shared = np.zeros((64, num), np.int64)
    rows = np.zeros(num, np.int64)
    membership = np.full(num, -1, np.int64)
    for place in processing:
        best, target = -1, opened
        for k in range(opened):
            after = rows[k] + lengths[place] - shared[k, place]
            score = after if best_fit else shared[k, place]
            if after <= capacity and score > best:
                best, target = score, k
        if target == opened:
            opened += 1
            if opened > len(shared):
                more = np.zeros((2 * len(shared), num), np.int64)
                more[: len(shared)] = shared
                shared = more
        rows[target] += lengths[place] - shared[target, place]
        membership[place] = target
        _share(shared[target], place, target, membership, adjacent_lcp)
    return membership, rows[:opened].copy()


@jit
def _share(shared: Ints, place: int, target: int, membership: Ints, adjacent_lcp: Ints) -> None:
    """Tell the places up to the neighbouring members what they share with the new one."""
    common = adjacent_lcp[place]
    for other in range(place - 1, -1, -1):
        shared[other] = max(shared[other], common)
        if common == 0 or membership[other] == target:
            break
        common = min(common, adjacent_lcp[other])
    if place + 1 < len(membership):
        common = adjacent_lcp[place + 1]
        for other in range(place + 1, len(membership)):
            common = min(common, adjacent_lcp[other])
            shared[other] = max(shared[other], common)
            if common == 0 or membership[other] == target:
                break


def _fill_by_rows(
    processing: Ints, adjacent_lcp: Ints, lengths: Ints, capacity: int, best_fit: bool
) -> tuple[Ints, Ints]:
    """`_fill` in numpy: all microbatches are scored, and all places told, at once."""
    num, opened = len(processing), 0
    shared = np.zeros((64, num), np.int64)
    rows = np.zeros(num, np.int64)
    membership = np.full(num, -1, np.int64)
    for place in processing.tolist():
        common = shared[:opened, place]
        after = rows[:opened] + (lengths[place] - common)
        score = np.where(after <= capacity, after if best_fit else common, -1)
        target = int(score.argmax()) if opened else 0
        if not opened or score[target] < 0:
            target, opened = opened, opened + 1
            if opened > len(shared):
                shared = np.concatenate([shared, np.zeros_like(shared)])
        rows[target] += lengths[place] - shared[target, place]
        membership[place] = target
        np.maximum(shared[target], _shared_with_places(place, adjacent_lcp), out=shared[target])
    return membership, rows[:opened].copy()
