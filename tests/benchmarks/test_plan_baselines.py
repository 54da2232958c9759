"""Planners that harts is compared with: legal on any forest, and the small optimum is one."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.plan.verify import verify_plan
from tests.planner_oracles import partitions, prefix_counts
from tests.strategies import trajectory_batches

pytest.importorskip("ortools", reason="the bench extra is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from plan_baselines.dta import plan_dta
from plan_baselines.exhaustive import plan_exhaustively
from plan_baselines.next_fit import plan_next_fit
from plan_baselines.ortools_ffd import arrange, partition_trees, plan_ortools
from plan_baselines.tree_partition import partition_tree, shared_nodes
from plan_data import small_batches
from plan_measure import quality
from plan_table import balance, best_ortools

from harts.tree.order import sort_trajectories

few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def capacity_of(batch: TrajectoryBatch, slack: float) -> int:
    longest = int(batch.lengths.max())
    return longest + int(slack * (len(batch.tokens) - longest))


def rows_of(batch: TrajectoryBatch) -> list[tuple[int, ...]]:
    return [tuple(row["input_ids"].tolist()) for row in batch.rows()]


def next_fit_count(rows: list[tuple[int, ...]], capacity: int) -> int:
    """Groups that filling in sorted order needs, without rows that are prefixes of the next."""
    ordered = sorted(rows)
    maximal = [a for a, b in pairwise([*ordered, ()]) if b[: len(a)] != a]
    count, group = 1, maximal[:1]
    for row in maximal[1:]:
        group.append(row)
        if len(prefix_counts(group)) > capacity:
            count, group = count + 1, [row]
    return count


def optimum(
    batch: TrajectoryBatch, capacity: int, replicas: int, most: int | None = None
) -> int | None:
    """Least total of unique prefixes over set partitions of at most `most` groups, by counting."""
    rows, totals = rows_of(batch), []
    for groups in partitions(list(range(len(rows)))):
        work = [len(prefix_counts([rows[i] for i in group])) for group in groups]
        few_enough = most is None or len(groups) <= most
        if few_enough and len(groups) % replicas == 0 and max(work) <= capacity:
            totals.append(sum(work))
    return min(totals, default=None)


@few
@given(trajectory_batches(), st.floats(0, 1), st.integers(1, 3))
@pytest.mark.parametrize("planner", [plan_next_fit, plan_dta, plan_ortools])
def test_a_baseline_gives_legal_plans_of_any_forest(planner, batch, slack, replicas):
    capacity = capacity_of(batch, slack)
    try:
        plan = planner(batch, capacity, replicas)
    except PlanError:
        # singletons are legal where their number is a multiple of the replicas
        assert len(batch) % replicas, "a plan exists"
        return
    verify_plan(plan)


@few
@given(trajectory_batches(), st.floats(0, 1), st.integers(1, 3))
def test_exhaustive_search_finds_the_least_work_of_all_set_partitions(batch, slack, replicas):
    batch = batch.select(np.arange(min(len(batch), 6)))
    capacity = capacity_of(batch, slack)
    expected = optimum(batch, capacity, replicas)
    if expected is None:
        with pytest.raises(PlanError, match="no partition"):
            plan_exhaustively(batch, capacity, replicas)
        return
    plan = plan_exhaustively(batch, capacity, replicas)
    verify_plan(plan)
    assert plan.compact_tokens == expected


@few
@given(trajectory_batches())
def test_shared_nodes_are_the_rows_that_several_trajectories_pass(batch):
    order = sort_trajectories(batch)
    nodes, private, node_of_item = shared_nodes(order)
    counts = prefix_counts(rows_of(batch))
    assert sum(node.length for node in nodes) == sum(count > 1 for count in counts.values())
    assert sum(private) == sum(count == 1 for count in counts.values())
    for item, node in enumerate(node_of_item):
        depth = private[item]
        while node >= 0:
            assert nodes[node].begin <= item < nodes[node].end
            depth, node = depth + nodes[node].length, nodes[node].parent
        assert depth == order.lengths[item]


@few
@given(trajectory_batches(), st.floats(0, 1))
def test_a_proven_tree_without_whole_subtrees_has_the_least_work(batch, slack):
    batch = batch.select(np.arange(min(len(batch), 6)))
    capacity = capacity_of(batch, slack)
    order = sort_trajectories(batch)
    found = partition_tree(order, capacity, seconds=5, workers=1, whole_fraction=None)
    work = sum(
        int(order.take(np.flatnonzero(found.partition_of_place == k)).new_rows.sum())
        for k in np.unique(found.partition_of_place)
    )
    assert found.optimal
    most = next_fit_count(rows_of(batch), capacity) + 1
    assert work == optimum(batch, capacity, 1, most)


@few
@given(trajectory_batches(), st.floats(0, 1), st.sampled_from(["compact", "raw", "partitions"]))
def test_every_way_to_deal_trees_is_legal(batch, slack, size):
    capacity = capacity_of(batch, slack)
    trees = partition_trees(batch, capacity, seconds_per_tree=1, workers=1)
    for merge in (False, True):
        verify_plan(arrange(batch, trees, capacity, 1, size=size, merge=merge))


def test_segments_of_dta_are_contiguous_and_even():
    rows = [{"input_ids": [i] + [9] * 9, "loss_mask": [0] * 10} for i in range(8)]
    plan = plan_dta(TrajectoryBatch.from_rows(rows), 35, 2)
    assert plan.compact_tokens_of_microbatch.tolist() == [20, 20, 20, 20]
    assert plan.microbatch_of_trajectory.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_cp_sat_groups_what_next_fit_separates():
    """One shared token and 4, 4, 6, 6 of their own in 11: next-fit uses three, not two."""
    rows = [
        {"input_ids": [1, first, *[0] * (own - 1)], "loss_mask": [0] * (own + 1), "group_id": 0}
        for first, own in ((2, 4), (3, 4), (4, 6), (5, 6))
    ]
    batch = TrajectoryBatch.from_rows(rows)
    assert plan_next_fit(batch, 11, 1).compact_tokens == 23
    plan = plan_ortools(batch, 11, 1)
    assert plan.compact_tokens_of_microbatch.tolist() == [11, 11]


def test_too_many_trajectories_for_exhaustive_search_are_an_error():
    rows = [{"input_ids": [i], "loss_mask": [0]} for i in range(13)]
    with pytest.raises(PlanError, match="13 trajectories; exhaustive search takes at most 12"):
        plan_exhaustively(TrajectoryBatch.from_rows(rows), 10, 1)


def test_ortools_quality_is_its_best_run_and_its_time_the_fastest_run_close_to_that():
    def run(work: int, seconds: float) -> dict[str, object]:
        return {"seconds": [seconds], "quality": {"4": {"compact_tokens": work}}}

    runs = {"ortools_0.2": run(1006, 3), "ortools_1": run(1004, 16), "ortools_3": run(1000, 48)}
    assert best_ortools(runs | {"harts": {}}) == ("ortools_3", "ortools_1")


def test_measured_imbalance_is_that_of_the_plan():
    rows = [{"input_ids": [i] * n, "loss_mask": [0] * n} for i, n in enumerate((4, 2, 9, 6))]
    plan = plan_next_fit(TrajectoryBatch.from_rows(rows), 9, 2)
    found = quality(plan)
    slots, p50, p95, step, largest = balance([found])
    assert slots == plan.num_slots
    assert step == largest == pytest.approx(100 * plan.step_imbalance)
    assert p50 == pytest.approx(100 * plan.slot_imbalance["p50"])
    assert p95 == pytest.approx(100 * plan.slot_imbalance["p95"])
    assert found["compact_tokens"] == 21


def test_small_instances_are_legal_input_and_the_same_every_time():
    first, second = list(small_batches(12)), list(small_batches(12))
    for (kind, batch, capacity, _), (_, again, capacity_again, _) in zip(
        first, second, strict=True
    ):
        assert 2 <= len(batch) <= 9 and int(batch.lengths.max()) <= capacity == capacity_again, kind
        assert np.array_equal(batch.tokens, again.tokens)
