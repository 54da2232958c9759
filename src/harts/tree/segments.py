"""The segment forest of a set of trajectories, as arrays.

Trie rows are numbered as sorted trajectories create them: trajectory i adds its rows below
lcp[i] in one run. A segment (a fork-free run of rows) is contiguous in this numbering.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from harts.tree.order import Ints, TrajectoryOrder


@dataclass(frozen=True)
class SegmentForest:
    """Segments in trie-row order, so parents come before children.

    parent: int64 (V,), -1 for a root. length, start: int64 (V,), rows and depth of the first row.
    first_row: int64 (V,), trie row of the segment's first row.
    end_row: int64 (N,), trie row of each trajectory's last token, by place in the order.
    num_rows: unique prefixes C of the set.
    """

    parent: Ints
    length: Ints
    start: Ints
    first_row: Ints
    end_row: Ints
    num_rows: int


def build_segments(order: TrajectoryOrder) -> SegmentForest:
    """Cut the trie of sorted trajectories at its forks. O(C + N log depth), no recursion."""
    lcp, lengths = order.lcp.tolist(), order.lengths.tolist()
    base = np.concatenate([[0], np.cumsum(order.new_rows)]).tolist()
    path_lcp: list[int] = []  # runs of rows that make up the current path: depth and trie row
    path_row: list[int] = []

    def row_on_path(depth: int) -> int:
        run = bisect_right(path_lcp, depth) - 1
        return path_row[run] + depth - path_lcp[run]

    parent_row_of_start: dict[int, int] = {}
    end_row = np.empty(len(lcp), np.int64)
    for place, (shared, length) in enumerate(zip(lcp, lengths, strict=True)):
        previous = lengths[place - 1] if place else 0
        if length > shared:
            if shared == 0:
                parent_row_of_start[base[place]] = -1
            elif shared < previous:  # the row before leads on to another row already: a fork
                fork = row_on_path(shared - 1)
                parent_row_of_start.setdefault(row_on_path(shared), fork)
                parent_row_of_start[base[place]] = fork
            keep = bisect_right(path_lcp, shared - 1) if shared else 0
            del path_lcp[keep:], path_row[keep:]
            path_lcp.append(shared)
            path_row.append(base[place])
        end_row[place] = row_on_path(length - 1)

    first_row = np.array(sorted(parent_row_of_start), dtype=np.int64)
    parent_row = np.array([parent_row_of_start[row] for row in first_row.tolist()], dtype=np.int64)
    parent = np.searchsorted(first_row, parent_row, side="right") - 1
    parent[parent_row < 0] = -1
    length_of = np.diff(np.concatenate([first_row, [base[-1]]]))
    start = np.zeros(len(first_row), np.int64)
    for segment, above in enumerate(parent.tolist()):
        if above >= 0:
            start[segment] = start[above] + length_of[above]
    return SegmentForest(parent, length_of, start, first_row, end_row, int(base[-1]))
