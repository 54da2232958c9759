"""The segment forest of a microbatch as boxes to draw: few enough for a page, none forgotten.

A box spans the compact rows of a subtree on one axis and the depth of its own segment on the
other. Subtrees too small to see beside their siblings become one box for a run of neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from harts.plan.microbatch import MicroBatch
from harts.report.segments import SegmentTable, segment_table
from harts.tree.order import Ints


@dataclass(frozen=True, kw_only=True)
class Box:
    """One segment, or `segments` of them drawn together.

    parent: index of the box above, -1 for none. first, rows: compact rows of the whole subtree.
    own: rows of this box alone. depth, length: extent in tokens; of several, down to the deepest.
    chain: number of the chain from 0, round: from 1; -1 and 0 where they differ.
    trajectories: that pass through or end here. replay: rows fed again before chains that start
    here. task: index of the only task here, -1 for several. shade: 0 or 1, in turn over the
    chains of a round.
    """

    parent: int
    first: int
    rows: int
    own: int
    depth: int
    length: int
    chain: int
    round: int
    trajectories: int
    segments: int
    replay: int
    task: int
    shade: int


@dataclass(frozen=True)
class Boxes:
    """Boxes in layout order, parents first; runs of neighbours below `together` rows are one."""

    boxes: tuple[Box, ...]
    num_rows: int
    deepest: int
    together: int


def boxes_of(
    microbatch: MicroBatch, *limits: int, task_of_trajectory: Ints | None = None
) -> list[Boxes]:
    """The boxes of a microbatch for each limit on their number, at least one box.

    task_of_trajectory: int64 (N,), task index of every trajectory of the batch. Rows, segments
    and replay of the boxes add up to those of the microbatch. O(V log C + N log V).
    """
    table = segment_table(microbatch, task_of_trajectory)
    deepest = max(table.bottom)
    found = []
    for limit in limits:
        together = 1
        kept = _boxes(table, together)
        while len(kept) > limit and together <= microbatch.num_rows:
            together += max(1, together // 2)
            kept = _boxes(table, together)
        found.append(Boxes(tuple(kept), microbatch.num_rows, deepest, together))
    return found


def _boxes(table: SegmentTable, together: int) -> list[Box]:
    """Parents first; siblings next to each other below `together` rows are one box."""
    box_of: dict[int, int] = {-1: -1}
    run_of: dict[int, list[int]] = {}  # by parent: neighbours not yet made into a box
    boxes: list[Box] = []

    def close(parent: int) -> None:
        run = run_of.pop(parent, [])
        if run:
            single = len(run) == 1 and table.segments[run[0]] == 1
            above = box_of[parent]
            box = _segment_box(table, run[0], above) if single else _run_box(table, run, above)
            boxes.append(box)

    for segment in sorted(range(len(table.first)), key=table.first.__getitem__):
        parent = table.parent[segment]
        if parent not in box_of:
            continue  # inside a run
        if table.rows[segment] < together:
            run_of.setdefault(parent, []).append(segment)
            continue
        close(parent)
        box_of[segment] = len(boxes)
        boxes.append(_segment_box(table, segment, box_of[parent]))
    for parent in list(run_of):
        close(parent)
    return boxes


def _segment_box(table: SegmentTable, segment: int, parent: int) -> Box:
    low, high = table.low_task[segment], table.high_task[segment]
    return Box(
        parent=parent,
        first=table.first[segment],
        rows=table.rows[segment],
        own=table.length[segment],
        depth=table.depth[segment],
        length=table.length[segment],
        chain=table.chain[segment],
        round=table.round[segment],
        trajectories=table.trajectories[segment],
        segments=1,
        replay=table.replay[segment],
        task=low if low == high else -1,
        shade=table.shade[segment],
    )


def _run_box(table: SegmentTable, run: list[int], parent: int) -> Box:
    depth, rows = table.depth[run[0]], sum(table.rows[s] for s in run)
    low, high = min(table.low_task[s] for s in run), max(table.high_task[s] for s in run)
    return Box(
        parent=parent,
        first=table.first[run[0]],
        rows=rows,
        own=rows,
        depth=depth,
        length=max(table.bottom[s] for s in run) - depth,
        chain=-1,
        round=0,
        trajectories=sum(table.trajectories[s] for s in run),
        segments=sum(table.segments[s] for s in run),
        replay=sum(table.replay_below[s] for s in run),
        task=low if low == high else -1,
        shade=0,
    )
