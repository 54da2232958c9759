"""Contiguous partitions of least compact work for every K (paper section 3.2, Equation 9).

F[k, e] is the least work of the first e places in k microbatches, and among equal work the one
whose heaviest microbatch is lightest. The work of [s, e) falls as s rises, so the starts that fit
the capacity are a band below each e, and only the band is searched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harts.plan.cost import PrefixCost
from harts.plan.jit import HAVE_NUMBA, jit, kernel
from harts.plan.partition import Partition
from harts.tree.order import Ints

Int32s = npt.NDArray[np.int32]
# far above any work, and twice of it still fits int64
UNREACHABLE = 2**61


def exact_partitions(
    cost: PrefixCost, candidates: Sequence[int], *, capacity: int, use_numba: bool = HAVE_NUMBA
) -> dict[int, Partition]:
    """{K: best partition into K contiguous intervals within `capacity`}, for each K that has one.

    Ties in work by the smaller maximum of a microbatch, then by the leftmost start of the last
    microbatch where the partitions differ. With B the most neighbours that fit one microbatch,
    O(K_max N B) time and O(K_max N + N B) memory; numba and numpy agree exactly.
    """
    num = len(cost)
    counts = [k for k in candidates if k <= num]
    if not counts:
        return {}
    first = _first_start(cost, capacity)
    if use_numba:
        fill = kernel(_fill, use_numba=True)
        last_start = fill(cost.rows_before, cost.adjacent_lcp, first, max(counts))
    else:
        last_start = _fill_by_rows(cost, first, max(counts))
    return {k: cost.cut_at(_recover(last_start, k)) for k in counts if last_start[k, num] >= 0}


def _first_start(cost: PrefixCost, capacity: int) -> Ints:
    """int64 (N+1,): the smallest s for which [s, e) fits, e itself where none does."""
    # W(s, e) <= capacity  <=>  rows_before[s] - adjacent_lcp[s] >= rows_before[e] - capacity,
    # and the left side never falls as s rises
    gained = cost.rows_before[:-1] - cost.adjacent_lcp
    first = np.searchsorted(gained, cost.rows_before - capacity)
    return np.minimum(first, np.arange(len(cost) + 1))


def _recover(last_start: Int32s, num_microbatches: int) -> Ints:
    starts = np.empty(num_microbatches, np.int64)
    end = last_start.shape[1] - 1
    for k in range(num_microbatches, 0, -1):
        end = last_start[k, end]
        starts[k - 1] = end
    return starts


@jit
def _fill(rows_before: Ints, adjacent_lcp: Ints, first: Ints, num_microbatches: int) -> Int32s:
    """int32 (K+1, N+1): the start of the last microbatch of F[k, e], -1 where there is none."""
    num = len(adjacent_lcp)
    last_start = np.full((num_microbatches + 1, num + 1), -1, np.int32)
    total, heaviest = np.full(num + 1, UNREACHABLE), np.zeros(num + 1, np.int64)
    new_total, new_heaviest = total.copy(), heaviest.copy()
    total[0] = 0
    for k in range(1, num_microbatches + 1):
        new_total[:k] = UNREACHABLE
        for end in range(k, num + 1):
            best, best_heaviest, best_start = UNREACHABLE, UNREACHABLE, -1
            for start in range(max(first[end], k - 1), end):
                if total[start] == UNREACHABLE:
                    continue
                work = rows_before[end] - rows_before[start] + adjacent_lcp[start]
                candidate, candidate_heaviest = total[start] + work, max(heaviest[start], work)
                if candidate < best or (candidate == best and candidate_heaviest < best_heaviest):
                    best, best_heaviest, best_start = candidate, candidate_heaviest, start
            new_total[end], new_heaviest[end] = best, best_heaviest
            last_start[k, end] = best_start
        total, new_total = new_total, total
        heaviest, new_heaviest = new_heaviest, heaviest
    return last_start


def _fill_by_rows(cost: PrefixCost, first: Ints, num_microbatches: int) -> Int32s:
    """`_fill` with all ends of one k at once, over a band as wide as the widest microbatch."""
    num = len(cost)
    ends = np.arange(num + 1)
    width = max(1, int((ends - first).max()))
    starts = ends[:, None] - np.arange(width, 0, -1)  # row e: e - width, ..., e - 1
    work = cost.interval(np.maximum(starts, 0), ends[:, None])
    work[starts < first[:, None]] = UNREACHABLE
    last_start = np.full((num_microbatches + 1, num + 1), -1, np.int32)
    # `width` unreachable entries in front, so that every row has a whole window of starts
    total, heaviest = np.full(width + num + 1, UNREACHABLE), np.zeros(width + num + 1, np.int64)
    total[width] = 0
    window = np.lib.stride_tricks.sliding_window_view
    for k in range(1, num_microbatches + 1):
        candidate = window(total[:-1], width)[: num + 1] + work
        best = candidate.min(axis=1)
        candidate_heaviest = np.maximum(window(heaviest[:-1], width)[: num + 1], work)
        candidate_heaviest[candidate != best[:, None]] = UNREACHABLE
        choice = candidate_heaviest.argmin(axis=1)
        reached = best < UNREACHABLE
        last_start[k, reached] = starts[reached, choice[reached]]
        total[width:] = np.where(reached, best, UNREACHABLE)
        heaviest[width:] = candidate_heaviest[ends, choice]
    return last_start
