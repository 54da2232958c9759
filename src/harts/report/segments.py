"""Every segment of a microbatch with what a drawing tells of it: place, chain, sums below it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from harts.plan.microbatch import MicroBatch
from harts.tree.order import Ints

_NO_TASK = 1 << 62


@dataclass(frozen=True, kw_only=True)
class SegmentTable:
    """Columns over the V segments, as lists; parents before children.

    first, length, depth: compact row and depth of the first row, and the number of own rows.
    chain: from 0, round: from 1, shade: 0 or 1 in turn over the chains of a round. replay: rows
    fed again where a chain starts here. Of the whole subtree: rows, bottom (its greatest depth),
    trajectories, segments, replay_below, low_task and high_task (task indices that end there).
    """

    parent: list[int]
    first: list[int]
    length: list[int]
    depth: list[int]
    chain: list[int]
    round: list[int]
    shade: list[int]
    replay: list[int]
    rows: list[int]
    bottom: list[int]
    trajectories: list[int]
    segments: list[int]
    replay_below: list[int]
    low_task: list[int]
    high_task: list[int]


def segment_table(microbatch: MicroBatch, task_of_trajectory: Ints | None) -> SegmentTable:
    """Measure all segments. O(V + N log V); needs no array over rows.

    task_of_trajectory: int64 (N,), task index of every trajectory of the batch, or None.
    """
    forest = microbatch.forest
    size = len(forest.parent)
    parent, length, depth = forest.parent.tolist(), forest.length.tolist(), forest.start.tolist()
    first, chain, round_, shade, replay = ([0] * size for _ in range(5))
    in_round: Counter[int] = Counter()
    next_row = 0
    for index, sequence in enumerate(microbatch.calls.sequences):
        # chains are contiguous and come in the order of the compact layout: a child's whole
        # subtree before the next side branch
        for segment in sequence.segments:
            first[segment], next_row = next_row, next_row + length[segment]
            chain[segment], round_[segment] = index, sequence.round
            shade[segment] = in_round[sequence.round] % 2
        in_round[sequence.round] += 1
        replay[sequence.segments[0]] = sequence.replay
    ending, low_task, high_task = _endings(microbatch, task_of_trajectory)
    return SegmentTable(
        parent=parent,
        first=first,
        length=length,
        depth=depth,
        chain=chain,
        round=round_,
        shade=shade,
        replay=replay,
        rows=_below(parent, length),
        bottom=_least_below(parent, [-d - n for d, n in zip(depth, length, strict=True)], -1),
        trajectories=_below(parent, ending),
        segments=_below(parent, [1] * size),
        replay_below=_below(parent, replay),
        low_task=_least_below(parent, low_task, 1),
        high_task=_least_below(parent, [-task for task in high_task], -1),
    )


def _below(parent: list[int], values: list[int]) -> list[int]:
    """Sums over subtrees."""
    sums = list(values)
    for segment in range(len(parent) - 1, -1, -1):
        if parent[segment] >= 0:
            sums[parent[segment]] += sums[segment]
    return sums


def _least_below(parent: list[int], values: list[int], sign: int) -> list[int]:
    """Least values over subtrees, times sign."""
    least = list(values)
    for segment in range(len(parent) - 1, -1, -1):
        above = parent[segment]
        if above >= 0 and least[segment] < least[above]:
            least[above] = least[segment]
    return [sign * value for value in least]


def _endings(
    microbatch: MicroBatch, task_of_trajectory: Ints | None
) -> tuple[list[int], list[int], list[int]]:
    """Trajectories that end in each segment, and the least and the greatest of their tasks."""
    forest = microbatch.forest
    size = len(forest.parent)
    segment = np.searchsorted(forest.first_row, forest.end_row, side="right") - 1
    low, high = np.full(size, _NO_TASK), np.full(size, -1)
    if task_of_trajectory is not None:
        task = task_of_trajectory[microbatch.order.ids]
        np.minimum.at(low, segment, task)
        np.maximum.at(high, segment, task)
    return np.bincount(segment, minlength=size).tolist(), low.tolist(), high.tolist()
