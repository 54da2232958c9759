"""What a rollout forest looks like: sizes, forks and sharing, for people and for tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.tree.order import TrajectoryOrder, sort_trajectories
from harts.tree.segments import build_segments


@dataclass(frozen=True, kw_only=True)
class ForestStats:
    """Counts over the trie of a whole batch; compression is raw_tokens / trie_tokens."""

    trajectories: int
    raw_tokens: int
    trie_tokens: int
    compression: float
    scored_tokens: int
    longest: int
    segments: int
    roots: int
    forks: int
    max_fan_out: int
    max_fork_depth: int


def forest_stats(batch: TrajectoryBatch, order: TrajectoryOrder | None = None) -> ForestStats:
    """Measure a batch; O(S) and one sort unless its order is given."""
    forest = build_segments(order or sort_trajectories(batch))
    children = np.bincount(forest.parent[forest.parent >= 0], minlength=len(forest.parent))
    fork_depth = np.zeros(len(forest.parent), np.int64)  # forks above each segment
    for segment, above in enumerate(forest.parent.tolist()):
        if above >= 0:
            fork_depth[segment] = fork_depth[above] + 1
    return ForestStats(
        trajectories=len(batch),
        raw_tokens=len(batch.tokens),
        trie_tokens=forest.num_rows,
        compression=len(batch.tokens) / forest.num_rows,
        scored_tokens=int(batch.loss_mask.sum()),
        longest=int(batch.lengths.max()),
        segments=len(forest.parent),
        roots=int((forest.parent < 0).sum()),
        forks=int((children > 1).sum()),
        max_fan_out=int(children.max()),
        max_fork_depth=int(fork_depth.max()),
    )
