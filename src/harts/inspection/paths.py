"""The trie rows on the path of each trajectory, in lexicographic order, in little memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.tree.order import Ints, TrajectoryOrder


@dataclass(frozen=True)
class TriePath:
    """Runs of consecutive trie rows: run r begins at depth start[r] (0 first) with row row[r]."""

    start: Ints
    row: Ints

    def rows(self, positions: Ints) -> Ints:
        """Trie row of each position (P,) of the trajectory. O(P log runs)."""
        run = np.searchsorted(self.start, positions, side="right") - 1
        rows: Ints = self.row[run] + positions - self.start[run]
        return rows


def trie_paths(order: TrajectoryOrder) -> Iterator[TriePath]:
    """The path at each place of the order; rows are numbered as `build_segments` does.

    O(N depth) in all, where depth counts the trajectories that a path shares rows with.
    """
    start: list[int] = []
    row: list[int] = []
    next_row = 0
    for shared, length in zip(order.lcp.tolist(), order.lengths.tolist(), strict=True):
        if length > shared:
            keep = bisect_left(start, shared)
            del start[keep:], row[keep:]
            start.append(shared)
            row.append(next_row)
            next_row += length - shared
        yield TriePath(np.array(start, np.int64), np.array(row, np.int64))


def scored_paths(
    batch: TrajectoryBatch, order: TrajectoryOrder
) -> Iterator[tuple[int, TriePath, Ints]]:
    """(trajectory, its path, its scored positions) at each place of the order."""
    for trajectory, path in zip(order.ids.tolist(), trie_paths(order), strict=True):
        begin, end = batch.offsets[trajectory : trajectory + 2].tolist()
        yield trajectory, path, np.flatnonzero(batch.loss_mask[begin:end])
