"""The page of a rollout file: its numbers are the inspection's, names cannot break it."""

from __future__ import annotations

from pathlib import Path

import pytest

import harts
from harts.data.synthetic import SyntheticOptions, generate
from harts.data.trajectory import TrajectoryBatch
from harts.inspection.inspect import inspect_batch
from harts.report.inspect_report import compression_bars, inspect_page, write_inspect_report
from tests.report.pages import Page, assert_described, assert_self_contained

LIMIT = 500_000


def broken_batch() -> TrajectoryBatch:
    """Two steps of a rollout, the second without token 7 that the first one has."""
    rows = [
        {"input_ids": [1, 2, 3, 7, 4, 5, 6], "loss_mask": [0] * 7, "group_id": "a"},
        {"input_ids": [1, 2, 3, 4, 5, 6, 8, 9], "loss_mask": [0] * 8, "group_id": "a"},
    ]
    return TrajectoryBatch.from_rows([row | {"rollout_id": 0} for row in rows])


def test_the_page_is_one_self_contained_file_with_text_for_every_drawing(
    batch: TrajectoryBatch,
) -> None:
    parsed = Page(inspect_page(inspect_batch(batch), batch, source="rollouts.jsonl"))
    assert_self_contained(parsed)
    assert_described(parsed)


def test_the_numbers_are_the_inspections(batch: TrajectoryBatch) -> None:
    found = inspect_batch(batch)
    words = Page(inspect_page(found, batch, source="rollouts.jsonl")).words
    for value in (
        found.trajectories.raw_tokens,
        found.forest.rows,
        found.forest.segments,
        found.forest.replay_rows,
        found.trajectories.longest.tokens,
        found.task_rows,
    ):
        assert f"{value:,}" in words
    assert f"{found.compression:.2f}×" in words
    for task in found.tasks:
        assert f"task {task.name} {task.compression:.2f}×" in words
    assert [bar.value for bar in compression_bars(found)][:3] == [
        found.trajectories.raw_tokens,
        found.task_rows,
        found.forest.rows,
    ]


def test_breaks_are_shown_with_their_cost_and_an_example() -> None:
    batch = broken_batch()
    found = inspect_batch(batch)
    assert found.breaks.count == 1
    parsed = Page(inspect_page(found, batch, source="a.jsonl"))
    kind = found.breaks.classes[0]
    assert f"{kind.kind} {kind.cost_rows:,} rows, 1 break" in parsed.words
    assert len(parsed.of("del")) == 1
    assert "trajectory 0, then trajectory 1, from token 3" in parsed.words


def test_the_text_of_an_example_is_escaped() -> None:
    batch = broken_batch()
    found = inspect_batch(batch, decode=lambda ids: "<script>x</script>" * len(ids))
    parsed = Page(inspect_page(found, batch, source="a.jsonl"))
    assert_self_contained(parsed)
    assert len(parsed.scripts) == 2


def test_a_file_without_tasks_and_rollouts_says_so() -> None:
    batch = TrajectoryBatch.from_rows([{"input_ids": [1, 2], "loss_mask": [0, 1]}])
    words = Page(inspect_page(inspect_batch(batch), batch, source="a.jsonl")).words
    assert "no field that tells tasks apart" in words
    assert "no field that tells rollouts apart" in words


def test_hostile_names_are_only_text(hostile_batch: TrajectoryBatch, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    found = inspect_batch(hostile_batch, capacity=10)
    assert found.trajectories.over_capacity
    write_inspect_report(found, hostile_batch, path, source="a.jsonl")
    parsed = Page(path.read_text(encoding="utf-8"))
    assert_self_contained(parsed)
    assert len(parsed.scripts) == 2
    assert parsed.of("img") == []


@pytest.mark.parametrize("shape", ["agent_steps", "agent_tree", "star", "caterpillar"])
def test_thousands_of_trajectories_stay_below_the_limit(shape: str, tmp_path: Path) -> None:
    many = {"star": (4, 1_000, 1), "caterpillar": (2, 30, 60)}.get(shape, (100, 10, 5))
    tasks, rollouts, turns = many
    batch = generate(
        SyntheticOptions(
            shape=shape,  # type: ignore[arg-type]
            tasks=tasks,
            rollouts=rollouts,
            turns=turns,
            vocabulary=4_096,
            system_tokens=5,
            task_tokens=3,
            turn_tokens=4,
            observation_tokens=3,
        )
    )
    path = tmp_path / "report.html"
    write_inspect_report(inspect_batch(batch), batch, path, source="a.jsonl")
    assert path.stat().st_size < LIMIT
    (tree,) = Page(path.read_text(encoding="utf-8")).tree_data["trees"]
    assert sum(box[3] for box in tree["boxes"]) == tree["rows"]


def test_real_rollouts_show_their_breaks(tau_file: Path, tmp_path: Path) -> None:
    batch = harts.read(tau_file)
    path = tmp_path / "report.html"
    write_inspect_report(inspect_batch(batch), batch, path, source=tau_file.name)
    assert path.stat().st_size < LIMIT
    words = Page(path.read_text(encoding="utf-8")).words
    assert "18.38×" in words
    assert "83,870" in words
