"""Lexicographic order of trajectories, the common prefix of neighbours, and range minima.

In this order the longest prefix that a trajectory shares with any earlier one is the one it
shares with its predecessor, so all trie quantities follow from adjacent LCPs (Equations 5, 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from harts.data.trajectory import TrajectoryBatch

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class TrajectoryOrder:
    """Trajectories of a batch in lexicographic order of their prefix identity.

    ids: int64 (N,), trajectory at each place of the order; equal trajectories by ascending id.
    lcp: int64 (N,), rows shared with the predecessor; 0 for the first.
    lengths: int64 (N,), rows of the trajectory at each place.
    """

    ids: Ints
    lcp: Ints
    lengths: Ints

    @property
    def new_rows(self) -> Ints:
        """Rows each trajectory adds to the trie of its predecessors (Equation 5)."""
        return self.lengths - self.lcp

    def take(self, places: Ints) -> TrajectoryOrder:
        """The sub-order at ascending places (k,), with LCPs by range minimum. O(k + span)."""
        lcp = np.zeros(len(places), np.int64)
        # neighbours of a sub-order share the minimum over the places between them
        if len(places) > 1:
            shared = np.minimum.reduceat(self.lcp[: places[-1] + 1], places[:-1] + 1)
            lcp[1:] = shared[: len(places) - 1]
        return TrajectoryOrder(self.ids[places], lcp, self.lengths[places])


def sort_trajectories(batch: TrajectoryBatch) -> TrajectoryOrder:
    """Order a batch by tokens, and by the position field `identity` where it has one.

    Multikey quicksort (Bentley and Sedgewick) over whole runs of tokens: members of a group with
    a known common prefix are compared with a pivot from there on, and split by where and by which
    word they leave it. So each token of a trajectory is compared about once, and the LCPs come
    out of the same comparisons. O(S + N log N) time where pivots split evenly, at worst O(S N);
    O(N) memory beyond the tokens, and 3 words a position with `identity`.
    """
    words, per_row = _words(batch)
    bounds = (batch.offsets * per_row).tolist()
    paths = [words[a:b] for a, b in pairwise(bounds)]
    ids: list[int] = []
    lcp: list[int] = []
    # members in batch order, words that all of them share, words shared with what comes before
    todo = [(list(range(len(paths))), 0, 0)]
    while todo:
        members, shared, shared_before = todo.pop()
        pivot = paths[members[len(members) // 2]]
        if len(members) == 1 or shared == len(pivot):  # one trajectory or equal ones
            ids += members
            lcp += [shared_before] + [shared] * (len(members) - 1)
            continue
        parts = []
        for is_above, with_pivot, part in _split(paths, members, pivot, shared):
            parts.append((part, with_pivot, with_pivot if is_above else shared_before))
            shared_before = with_pivot
        todo += reversed(parts)
    order = np.array(ids, dtype=np.int64)
    return TrajectoryOrder(order, np.array(lcp, dtype=np.int64) // per_row, batch.lengths[order])


def _split(
    paths: list[Words], members: list[int], pivot: Words, shared: int
) -> list[tuple[bool, int, list[int]]]:
    """Parts in lexicographic order: (is above the pivot, words shared with it, members).

    The members of a part leave the pivot at one place by one word, or end there.
    """
    parts: dict[tuple[int, int, int], list[int]] = {}
    for member in members:
        path = paths[member]
        with_pivot = len(pivot) if path is pivot else _common_prefix(path, pivot, shared)
        # an end comes before any word
        word = int(path[with_pivot]) if with_pivot < len(path) else -1
        pivot_word = int(pivot[with_pivot]) if with_pivot < len(pivot) else -1
        side = (word > pivot_word) - (word < pivot_word)
        # on both sides, what stays with the pivot for longer is closer to it
        key = (side, with_pivot if side < 0 else -with_pivot, word)
        parts.setdefault(key, []).append(member)
    return [(side > 0, abs(depth), parts[side, depth, word]) for side, depth, word in sorted(parts)]


def _words(batch: TrajectoryBatch) -> tuple[Words, int]:
    """What makes two positions the same row, as words (S * W,) that compare as numbers, and W.

    The token, and the two halves of the identity if the batch has one.
    """
    tokens = batch.tokens.view(np.uint32)
    identity = batch.position_fields.get("identity")
    if identity is None:
        return tokens, 1
    marks = identity.astype(np.int64).view(np.uint64)
    words = np.empty((len(tokens), 3), np.uint32)
    words[:, 0], words[:, 1], words[:, 2] = tokens, marks >> np.uint64(32), marks & 0xFFFFFFFF
    return words.ravel(), 3


def _common_prefix(a: Words, b: Words, begin: int) -> int:
    """Leading equal words of two arrays that agree before `begin`; reads growing blocks."""
    shorter, block = min(len(a), len(b)), 1024
    while begin < shorter:
        end = min(begin + block, shorter)
        differs = a[begin:end] != b[begin:end]
        first = int(differs.argmax())
        if differs[first]:
            return begin + first
        # larger blocks would not stay in the fastest cache
        begin, block = end, min(4 * block, 16384)
    return shorter


class RangeMinimum:
    """Minimum of any slice of an int64 array (N,) in constant time, by a sparse table.

    O(N log N) time and memory to build.
    """

    def __init__(self, values: Ints) -> None:
        self._levels = [np.asarray(values, np.int64)]
        width = 1
        while 2 * width <= len(values):
            below = self._levels[-1]
            self._levels.append(np.minimum(below[:-width], below[width:]))
            width *= 2

    def __call__(self, begin: int, end: int) -> int:
        """min(values[begin:end]) for a non-empty slice."""
        level = (end - begin).bit_length() - 1
        table = self._levels[level]
        return int(min(table[begin], table[end - (1 << level)]))
