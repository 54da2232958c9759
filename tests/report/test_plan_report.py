"""The plan's page: its numbers are the plan's, its size has a limit, names cannot break it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import harts
from harts.data.synthetic import SyntheticOptions, generate
from harts.data.trajectory import TrajectoryBatch
from harts.plan.planner import plan_step
from harts.plan.step_plan import StepPlan
from harts.report.plan_report import compression_bars, plan_page, plan_trees, write_plan_report
from harts.report.slots import slots_drawing, work_of
from harts.report.tasks import tasks_of
from tests.cli.conftest import Run, assert_refused
from tests.report.pages import Page, assert_described, assert_self_contained

LIMIT = 500_000


def test_the_page_is_one_self_contained_file_with_text_for_every_drawing(plan: StepPlan) -> None:
    parsed = Page(plan_page(plan, source="rollouts.jsonl"))
    assert_self_contained(parsed)
    assert_described(parsed)
    assert len(parsed.of("h1")) == 1
    assert len(parsed.of("table")) == 4


def test_the_numbers_are_the_plans(plan: StepPlan) -> None:
    words = Page(plan_page(plan, source="rollouts.jsonl")).words
    summary = plan.summary()
    for number in ("raw_tokens", "trie_tokens", "compact_tokens", "replay_tokens", "microbatches"):
        assert f"{summary[number]:,}" in words, number
    assert f"{summary['compression']:.2f}×" in words
    assert f"{100 * summary['slot_imbalance']['p95']:.1f} %" in words
    assert f"{100 * summary['step_imbalance']:.1f} %" in words


def test_replay_is_said_to_be_of_linear_attention_and_has_no_ratio_of_its_own(
    plan: StepPlan,
) -> None:
    summary = plan.summary()
    *_, rows, last = compression_bars(plan, None, summary["replay_tokens"])
    assert rows.text == f"{summary['compact_tokens']:,} · {summary['compression']:.2f}×"
    assert last.name == "Rows in linear-attention layers"
    assert last.text == f"{summary['compact_tokens'] + summary['replay_tokens']:,}"
    assert last.hatched == summary["replay_tokens"] > 0


def test_the_waterfall_goes_from_raw_tokens_to_rows(plan: StepPlan) -> None:
    summary = plan.summary()
    bars = compression_bars(plan, tasks_of(plan.batch), summary["replay_tokens"])
    tasks = plan.batch.trajectory_fields["group_id"]
    per_task = sum(
        len({tuple(row["input_ids"][:end].tolist()) for row in rows for end in ends(row)})
        for rows in (
            [row for row in plan.batch.rows() if row["group_id"] == task] for task in set(tasks)
        )
    )
    compact = summary["compact_tokens"]
    assert [bar.value for bar in bars] == [
        summary["raw_tokens"],
        per_task,
        summary["trie_tokens"],
        compact,
        compact + summary["replay_tokens"],
    ]


def ends(row: dict[str, np.ndarray]) -> range:
    return range(1, len(row["input_ids"]) + 1)


def test_bars_of_a_lane_are_as_long_as_their_work(plan: StepPlan) -> None:
    drawing = ElementTree.fromstring(slots_drawing(plan))
    total = work_of(plan).max(axis=1).sum()
    bars = [node for node in drawing.iter("rect") if node.get("data-tree")]
    assert len(bars) == plan.num_microbatches
    for bar in bars:
        rows = plan.compact_tokens_of_microbatch[int(bar.get("data-tree") or -1)]
        assert percentage(bar, "width") == pytest.approx(100 * rows / total, abs=1e-3)
    idle = [node for node in drawing.iter("rect") if node.get("class") == "idle"]
    missing = plan.replicas * total - plan.compact_tokens
    assert sum(percentage(node, "width") for node in idle) == pytest.approx(
        100 * missing / total, abs=1e-2
    )


def percentage(node: ElementTree.Element, name: str) -> float:
    return float((node.get(name) or "").removesuffix("%"))


def test_the_script_gets_every_row_of_every_microbatch(plan: StepPlan) -> None:
    data = Page(plan_page(plan, source="rollouts.jsonl")).tree_data
    assert len(data["trees"]) == plan.num_microbatches
    for tree in data["trees"]:
        assert tree["rows"] == plan.compact_tokens_of_microbatch[tree["key"]]
        assert sum(box[3] for box in tree["boxes"]) == tree["rows"]


def test_one_replica_has_no_imbalance_to_tell(batch: TrajectoryBatch) -> None:
    words = Page(plan_page(plan_step(batch, capacity=4096), source="a.jsonl")).words
    assert "imbalance of slots" not in words
    assert "1 microbatch in 1 slot on 1 replica: nothing waits for another replica." in words


def test_dropped_trajectories_are_counted(batch: TrajectoryBatch) -> None:
    plan = plan_step(batch, capacity=1_000, over_capacity="drop")
    assert (
        f"{len(plan.dropped)} trajectories were dropped" in Page(plan_page(plan, source="a")).words
    )


def test_hostile_names_are_only_text(hostile_batch: TrajectoryBatch, tmp_path: Path) -> None:
    plan = plan_step(hostile_batch, capacity=4096)
    path = tmp_path / "report.html"
    write_plan_report(plan, path, source="<script>alert(3)</script>")
    parsed = Page(path.read_text(encoding="utf-8"))
    assert_self_contained(parsed)
    assert len(parsed.scripts) == 2
    assert parsed.of("img") == []
    assert "<script>alert(3)</script>" in parsed.words
    assert any("alert(1)" in name for name in parsed.tree_data["tasks"])


@pytest.mark.parametrize("replicas", [1, 16])
def test_a_step_of_1600_trajectories_stays_below_the_limit(replicas: int, tmp_path: Path) -> None:
    options = SyntheticOptions(
        shape="agent_steps", tasks=16, rollouts=10, turns=10, system_tokens=200, vocabulary=4_096
    )
    batch = generate(options)
    assert len(batch) > 1_400
    plan = plan_step(batch, capacity=2_048, replicas=replicas)
    path = tmp_path / "report.html"
    write_plan_report(plan, path, source="step.jsonl")
    assert path.stat().st_size < LIMIT
    trees = plan_trees(plan, tasks_of(batch))
    assert sum(sum(box.own for box in tree.boxes.boxes) for tree in trees) == sum(
        int(plan.compact_tokens_of_microbatch[tree.key]) for tree in trees
    )


def test_thousands_of_microbatches_stay_below_the_limit(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [i, *range(30)], "loss_mask": [0] * 31, "group_id": i} for i in range(3_000)
    ]
    plan = plan_step(TrajectoryBatch.from_rows(rows), capacity=31)
    assert plan.num_microbatches == 3_000
    path = tmp_path / "report.html"
    write_plan_report(plan, path, source="step.jsonl")
    assert path.stat().st_size < LIMIT
    words = Page(path.read_text(encoding="utf-8")).words
    assert "The first 1,200 slots are drawn." in words
    assert "The first 256 microbatches in slot order are here." in words


def test_real_rollouts_in_one_microbatch_stay_below_the_limit(
    tau_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_plan_report(plan_step(harts.read(tau_file)), path, source=tau_file.name)
    assert path.stat().st_size < LIMIT
    assert "64,687 compact rows in" in Page(path.read_text(encoding="utf-8")).words


def test_the_command_writes_the_page_and_says_where(
    run_harts: Run, rollouts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.html"
    outcome = run_harts("plan", rollouts, "--capacity", 24, "--report", path)
    assert outcome.code == 0
    assert outcome.stdout.splitlines()[-1].split() == ["report", str(path)]
    assert_self_contained(Page(path.read_text(encoding="utf-8")))
    numbers = run_harts("plan", rollouts, "--capacity", 24, "--report", path, "--json").json
    assert "report" not in numbers


def test_the_command_never_replaces_the_rollouts(run_harts: Run, rollouts: Path) -> None:
    before = rollouts.read_text()
    outcome = run_harts("plan", rollouts, "--report", rollouts)
    assert_refused(outcome, rollouts, "is the file to read; give the report another name")
    assert rollouts.read_text() == before


def test_the_command_refuses_a_directory_before_it_reads(run_harts: Run, tmp_path: Path) -> None:
    outcome = run_harts("plan", tmp_path / "absent.jsonl", "--report", tmp_path)
    assert_refused(outcome, tmp_path, "is a directory; give the name of a file")
