"""Tokens that count more than once: scored in several trajectories of one rollout.

Two step rows that both score an earlier turn train on it twice.
"""

from __future__ import annotations

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.inspection.paths import scored_paths
from harts.tree.order import Ints, TrajectoryOrder


def scored_again(
    batch: TrajectoryBatch, order: TrajectoryOrder, rollouts: list[tuple[str, str]]
) -> int:
    """Tokens, each with all that precedes it, that several trajectories of a rollout score.

    rollouts: (task, rollout) of each trajectory, (N,). A token of a rollout counts once, however
    many trajectories score it. O(S log S) for S scored tokens.
    """
    rows_of_rollout: dict[tuple[str, str], list[Ints]] = {}
    for trajectory, path, scored in scored_paths(batch, order):
        rows_of_rollout.setdefault(rollouts[trajectory], []).append(path.rows(scored))
    again = 0
    for parts in rows_of_rollout.values():
        if len(parts) > 1:
            _, times = np.unique(np.concatenate(parts), return_counts=True)
            again += int((times > 1).sum())
    return again
