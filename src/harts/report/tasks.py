"""Tasks of a batch for reports: their names, and the rows each would need on its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harts.data.trajectory import TrajectoryBatch
from harts.inspection.tasks import names_by_field
from harts.tree.order import Ints, TrajectoryOrder

_LONGEST_NAME = 80


@dataclass(frozen=True)
class Tasks:
    """names: one a task, by first appearance. task_of_trajectory: int64 (N,)."""

    names: tuple[str, ...]
    task_of_trajectory: Ints

    def rows(self, order: TrajectoryOrder) -> int:
        """Unique tokens of every task by itself, added up. O(N) a task at worst."""
        task = self.task_of_trajectory[order.ids]
        return sum(
            int(order.take(np.flatnonzero(task == t)).new_rows.sum())
            for t in range(len(self.names))
        )


def tasks_of(batch: TrajectoryBatch) -> Tasks | None:
    """The tasks that the field `group_id` (or an alias) names, None where there is none."""
    field, name_of_trajectory = names_by_field(batch, "group_id")
    if field is None:
        return None
    index: dict[str, int] = {}
    task = [index.setdefault(name, len(index)) for name in name_of_trajectory]
    names = tuple(shortened(text) for text in index)
    return Tasks(names, np.array(task, dtype=np.int64))


def shortened(text: str) -> str:
    """A name on one line of at most 80 characters."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"
