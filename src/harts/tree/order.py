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

    Keys are big-endian bytes, so comparisons run at memory speed.
    O(S) memory, O(S + N log N * LCP / 16 bytes a cycle) time.
    """
    rows = _prefix_rows(batch)
    offsets = batch.offsets.tolist()
    keys = [rows[a:b].tobytes() for a, b in pairwise(offsets)]
    ids = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    lengths = batch.lengths[ids]
    lcp = np.zeros(len(ids), np.int64)
    flat = rows.view(np.uint32).reshape(len(rows), -1)
    for place in range(1, len(ids)):
        a, b = offsets[ids[place - 1]], offsets[ids[place]]
        shorter = int(min(lengths[place - 1], lengths[place]))
        lcp[place] = _common_prefix(flat[a : a + shorter], flat[b : b + shorter])
    return TrajectoryOrder(ids, lcp, lengths)


def _prefix_rows(batch: TrajectoryBatch) -> npt.NDArray[np.void]:
    """What makes two positions the same row: token, and identity if the batch has one."""
    identity = batch.position_fields.get("identity")
    if identity is None:
        return batch.tokens.astype(">u4").view([("token", ">u4")])
    rows = np.empty(len(batch.tokens), [("token", ">u4"), ("identity", ">u8")])
    rows["token"], rows["identity"] = batch.tokens, identity.astype(np.int64).view(np.uint64)
    return rows


def _common_prefix(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> int:
    """Leading equal rows of two arrays of equal length; stops at the first block that differs."""
    begin, block = 0, 1024
    while begin < len(a):
        differs = (a[begin : begin + block] != b[begin : begin + block]).any(axis=1)
        if differs.any():
            return begin + int(differs.argmax())
        begin, block = begin + block, block * 4
    return len(a)


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
