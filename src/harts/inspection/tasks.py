"""Tasks of a batch: each with a trie of its own, the worst compression first."""

from __future__ import annotations

import numpy as np

from harts.data.aliases import find
from harts.data.trajectory import TrajectoryBatch
from harts.inspection.result import TaskStats
from harts.tree.order import Ints, TrajectoryOrder


def names_by_field(batch: TrajectoryBatch, canonical: str) -> tuple[str | None, list[str]]:
    """The field that is there for a well-known name, and its entries as text, (N,).

    Without one (or with it per token) None, and the same empty name for all.
    """
    field = find(batch.trajectory_fields, canonical)
    if field is None:
        return None, [""] * len(batch)
    values = batch.trajectory_fields[field]
    if values.dtype.kind == "f" and (values == np.floor(values)).all():
        values = values.astype(np.int64)  # whole numbers that became floats beside nulls elsewhere
    return field, [str(value) for value in values.tolist()]


def tasks_of(
    batch: TrajectoryBatch, order: TrajectoryOrder, tasks: list[str], rollouts: list[str] | None
) -> tuple[TaskStats, ...]:
    """Statistics of each task; tasks, rollouts: names of each trajectory, (N,).

    O(N) and O(places a task spans) for each.
    """
    scored = np.add.reduceat(batch.loss_mask, batch.offsets[:-1], dtype=np.int64)
    places: dict[str, list[int]] = {}
    for place, trajectory in enumerate(order.ids.tolist()):
        places.setdefault(tasks[trajectory], []).append(place)
    stats = [
        _stats(name, order.take(np.array(members, np.int64)), scored, rollouts)
        for name, members in places.items()
    ]
    return tuple(sorted(stats, key=lambda task: (task.compression, task.name)))


def _stats(
    name: str, order: TrajectoryOrder, scored: Ints, rollouts: list[str] | None
) -> TaskStats:
    raw, rows = int(order.lengths.sum()), int(order.new_rows.sum())
    return TaskStats(
        name=name,
        rollouts=0 if rollouts is None else len({rollouts[i] for i in order.ids.tolist()}),
        trajectories=len(order.ids),
        raw_tokens=raw,
        rows=rows,
        scored_tokens=int(scored[order.ids].sum()),
        longest=int(order.lengths.max()),
        compression=raw / rows,
    )
