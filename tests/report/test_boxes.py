"""Boxes: nothing of a microbatch is lost or counted twice, however many are drawn together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.data.synthetic import SyntheticOptions, generate
from harts.data.trajectory import TrajectoryBatch
from harts.plan.microbatch import MicroBatch
from harts.report.boxes import Boxes, boxes_of
from harts.report.segments import segment_table
from harts.tree.order import sort_trajectories
from tests.strategies import token_trees


def whole(trajectories: list[list[int]], chunk_size: int = 4) -> MicroBatch:
    batch = TrajectoryBatch.from_rows(
        [{"input_ids": tokens, "loss_mask": [0] * len(tokens)} for tokens in trajectories]
    )
    return MicroBatch(0, batch, sort_trajectories(batch), chunk_size)


def rows_covered(boxes: Boxes) -> list[int]:
    """How many boxes hold each compact row as their own: own rows come first in a box."""
    covered = [0] * boxes.num_rows
    for box in boxes.boxes:
        for row in range(box.first, box.first + box.own):
            covered[row] += 1
    return covered


@given(token_trees(max_trajectories=12), st.integers(1, 12))
def test_boxes_hold_every_row_once_at_any_limit(trajectories: list[list[int]], limit: int) -> None:
    microbatch = whole(trajectories)
    (boxes,) = boxes_of(microbatch, limit)
    assert rows_covered(boxes) == [1] * microbatch.num_rows
    assert sum(box.segments for box in boxes.boxes) == len(microbatch.forest.parent)
    assert sum(box.replay for box in boxes.boxes) == microbatch.calls.replay_tokens
    assert boxes.deepest == max(len(tokens) for tokens in trajectories)
    assert len(boxes.boxes) <= limit or boxes.together > microbatch.num_rows


@given(token_trees(max_trajectories=12), st.integers(1, 12))
def test_boxes_lie_inside_the_box_above(trajectories: list[list[int]], limit: int) -> None:
    (boxes,) = boxes_of(whole(trajectories), limit)
    for place, box in enumerate(boxes.boxes):
        assert box.parent < place
        assert box.depth + box.length <= boxes.deepest
        if box.parent < 0:
            assert box.depth == 0
            continue
        above = boxes.boxes[box.parent]
        assert above.first + above.own <= box.first
        assert box.first + box.rows <= above.first + above.rows
        assert box.depth == above.depth + above.length
        assert box.trajectories <= above.trajectories


@given(token_trees(max_trajectories=12))
def test_segments_lie_where_the_compact_layout_has_them(trajectories: list[list[int]]) -> None:
    microbatch = whole(trajectories)
    layout, table = microbatch.layout, segment_table(microbatch, None)
    assert table.first == layout.first_row.tolist()
    assert table.rows == (layout.end_row - layout.first_row).tolist()
    assert table.trajectories == layout.multiplicity[layout.first_row].tolist()


@given(token_trees())
def test_without_a_limit_boxes_are_the_segments_and_their_chains(
    trajectories: list[list[int]],
) -> None:
    microbatch = whole(trajectories)
    (boxes,) = boxes_of(microbatch, 10_000)
    assert all(box.segments == 1 for box in boxes.boxes)
    assert sorted(box.length for box in boxes.boxes) == sorted(microbatch.forest.length.tolist())
    for index, sequence in enumerate(microbatch.calls.sequences):
        mine = [box for box in boxes.boxes if box.chain == index]
        assert len(mine) == len(sequence.segments)
        assert {box.round for box in mine} == {sequence.round}
        assert len({box.shade for box in mine}) == 1
    ends = {tuple(tokens) for tokens in trajectories}
    assert len({box.first for box in boxes.boxes}) == len(boxes.boxes)
    leaves = set(range(len(boxes.boxes))) - {box.parent for box in boxes.boxes}
    assert len(leaves) <= len(ends)


def test_a_box_names_its_task_only_if_it_has_one() -> None:
    microbatch = whole([[1, 2, 3], [1, 2, 4], [1, 5]])
    (boxes,) = boxes_of(microbatch, 100, task_of_trajectory=np.array([7, 7, 8]))
    tasks = {(box.depth, box.length, box.trajectories): box.task for box in boxes.boxes}
    assert tasks[0, 1, 3] == -1
    assert tasks[1, 1, 2] == 7
    assert tasks[1, 1, 1] == 8


@pytest.mark.parametrize("limit", [1, 50, 400, 5_000])
def test_a_star_of_1600_is_drawn_within_its_limit(limit: int) -> None:
    options = SyntheticOptions(
        shape="star", tasks=2, rollouts=800, turns=1, vocabulary=5_000, system_tokens=300
    )
    batch = generate(options)
    microbatch = MicroBatch(0, batch, sort_trajectories(batch), 64)
    (boxes,) = boxes_of(microbatch, limit)
    assert rows_covered(boxes) == [1] * microbatch.num_rows
    assert len(boxes.boxes) <= max(limit, 2)
    roots = [box for box in boxes.boxes if box.parent < 0]
    assert sum(box.trajectories for box in roots) == 1_600
