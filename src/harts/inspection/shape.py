"""The forest of a file: forks, rounds and replay, and rows by depth and by fan-out."""

from __future__ import annotations

import numpy as np

from harts.inspection.result import Forest, SegmentClass
from harts.plan.calls import plan_calls
from harts.tree.order import Ints
from harts.tree.segments import SegmentForest


def forest_shape(forest: SegmentForest, chunk_size: int) -> Forest:
    """Counts of a segment forest and of its minimum-call plan. O(V)."""
    fan_out = _fan_out(forest)
    calls = plan_calls(forest.parent, forest.length, chunk_size=chunk_size)
    forks = np.flatnonzero(fan_out)
    branch_position = forest.start[forks] + forest.length[forks]
    residues = np.bincount(branch_position % chunk_size, minlength=chunk_size)
    return Forest(
        rows=forest.num_rows,
        roots=int((forest.parent < 0).sum()),
        segments=len(forest.parent),
        forks=len(forks),
        max_fan_out=int(fan_out.max()),
        max_fork_depth=int(_forks_above(forest).max()),
        fork_residues=tuple(residues.tolist()),
        chains=len(calls.sequences),
        rounds=calls.num_rounds,
        replay_rows=calls.replay_tokens,
    )


def by_depth(forest: SegmentForest) -> tuple[SegmentClass, ...]:
    """Segments by the number of forks above them, from the roots down. O(V + N log V)."""
    return _classes(forest, _forks_above(forest))


def by_fan_out(forest: SegmentForest) -> tuple[SegmentClass, ...]:
    """Segments by the branches at their end, leaves (0) first. O(V + N log V)."""
    return _classes(forest, _fan_out(forest))


def _classes(forest: SegmentForest, number_of_segment: Ints) -> tuple[SegmentClass, ...]:
    numbers, member = np.unique(number_of_segment, return_inverse=True)
    segments, rows, raw = (np.zeros(len(numbers), np.int64) for _ in range(3))
    np.add.at(segments, member, 1)
    np.add.at(rows, member, forest.length)
    np.add.at(raw, member, _raw_tokens(forest))
    return tuple(
        SegmentClass(number=n, segments=s, rows=r, raw_tokens=t, compression=t / r)
        for n, s, r, t in zip(
            numbers.tolist(), segments.tolist(), rows.tolist(), raw.tolist(), strict=True
        )
    )


def _raw_tokens(forest: SegmentForest) -> Ints:
    """Sum over each segment's rows of the trajectories that pass them, (V,)."""
    last = np.searchsorted(forest.first_row, forest.end_row, side="right") - 1
    raw = np.zeros(len(forest.parent), np.int64)
    np.add.at(raw, last, forest.end_row - forest.first_row[last] + 1)
    passing = np.bincount(last, minlength=len(forest.parent)).tolist()
    below = [0] * len(passing)  # trajectories that end in segments below this one
    for segment in range(len(passing) - 1, -1, -1):
        above = int(forest.parent[segment])
        if above >= 0:
            below[above] += below[segment] + passing[segment]
    return raw + forest.length * np.array(below, dtype=np.int64)


def _fan_out(forest: SegmentForest) -> Ints:
    """Children of each segment, (V,): 0 or at least 2."""
    fan_out: Ints = np.bincount(forest.parent[forest.parent >= 0], minlength=len(forest.parent))
    return fan_out


def _forks_above(forest: SegmentForest) -> Ints:
    depth = [0] * len(forest.parent)
    for segment, above in enumerate(forest.parent.tolist()):
        if above >= 0:
            depth[segment] = depth[above] + 1
    return np.array(depth, dtype=np.int64)
