"""The whole planner: never worse than the paper's own, the same with and without numba."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import harts
from harts.errors import PlanError
from harts.plan.objective import Objective, plan_objective
from harts.plan.options import PlannerOptions
from harts.plan.placement import Placement
from tests.plan.ordered_trees import needs_numba
from tests.strategies import token_trees

CAPACITIES = st.integers(8, 40)
REPLICAS = st.integers(1, 3)


def _batch(trajectories: list[list[int]]) -> harts.TrajectoryBatch:
    return harts.TrajectoryBatch.from_rows(
        [{"input_ids": t, "loss_mask": [0] * len(t)} for t in trajectories]
    )


def _plan(
    trajectories: list[list[int]], capacity: int, replicas: int, options: PlannerOptions
) -> harts.StepPlan | None:
    """None where the planner finds no multiple of the replicas."""
    try:
        return harts.plan_step(_batch(trajectories), capacity, replicas, options=options)
    except PlanError:
        return None


def _objective(plan: harts.StepPlan) -> Objective:
    placement = Placement(plan.replica_of_microbatch, plan.slot_of_microbatch)
    return plan_objective(plan.compact_tokens_of_microbatch, placement)


FEW_STEPS = PlannerOptions(search_steps=300, balance_steps=200)


@settings(max_examples=60)
@given(
    trajectories=token_trees(max_trajectories=14, max_new_tokens=8),
    capacity=CAPACITIES,
    replicas=REPLICAS,
    exact_limit=st.sampled_from([0, 512]),
)
def test_a_plan_is_legal_and_never_worse_than_the_papers(
    trajectories: list[list[int]], capacity: int, replicas: int, exact_limit: int
) -> None:
    capacity = max(capacity, max(map(len, trajectories)))
    options = dataclasses.replace(FEW_STEPS, exact_limit=exact_limit)
    paper_options = dataclasses.replace(PlannerOptions.paper(), exact_limit=exact_limit)
    plan = _plan(trajectories, capacity, replicas, options)
    paper = _plan(trajectories, capacity, replicas, paper_options)
    assert (plan is None) == (paper is None)
    if plan is not None and paper is not None:
        harts.verify_plan(plan)
        harts.verify_plan(paper)
        assert _objective(plan) <= _objective(paper)


@settings(max_examples=30)
@given(
    trajectories=token_trees(max_trajectories=14, max_new_tokens=8),
    capacity=CAPACITIES,
    replicas=REPLICAS,
    seed=st.integers(0, 2**32 - 1),
)
def test_the_batch_in_another_order_gives_an_equal_objective(
    trajectories: list[list[int]], capacity: int, replicas: int, seed: int
) -> None:
    capacity = max(capacity, max(map(len, trajectories)))
    shuffled = [trajectories[i] for i in np.random.default_rng(seed).permutation(len(trajectories))]
    plan = _plan(trajectories, capacity, replicas, FEW_STEPS)
    other = _plan(shuffled, capacity, replicas, FEW_STEPS)
    assert (plan is None) == (other is None)
    if plan is not None and other is not None:
        assert _objective(plan) == _objective(other)


@needs_numba
@settings(max_examples=30)
@given(
    trajectories=token_trees(max_trajectories=14, max_new_tokens=8),
    capacity=CAPACITIES,
    replicas=REPLICAS,
    exact_limit=st.sampled_from([0, 512]),
)
def test_plans_are_the_same_with_and_without_numba(
    trajectories: list[list[int]], capacity: int, replicas: int, exact_limit: int
) -> None:
    capacity = max(capacity, max(map(len, trajectories)))
    with patch("harts.plan.options.SMALL_BATCH", 0):  # or both would run as Python
        plans = [
            _plan(
                trajectories,
                capacity,
                replicas,
                dataclasses.replace(FEW_STEPS, exact_limit=exact_limit, use_numba=use_numba),
            )
            for use_numba in (False, True)
        ]
    assert (plans[0] is None) == (plans[1] is None)
    if plans[0] is not None and plans[1] is not None:
        for name in ("microbatch_of_trajectory", "replica_of_microbatch", "slot_of_microbatch"):
            assert np.array_equal(getattr(plans[0], name), getattr(plans[1], name))


def test_long_trajectories_are_dropped_only_when_asked() -> None:
    batch = _batch([[1, 2, 3], [1, 2], [4, 5, 6, 7]])
    with pytest.raises(PlanError, match="trajectory 2 has 4 tokens"):
        harts.plan_step(batch, 3)
    plan = harts.plan_step(batch, 3, over_capacity="drop")
    harts.verify_plan(plan)
    assert plan.dropped.tolist() == [2]
    assert len(plan.batch) == 2 and plan.compact_tokens == 3
    with pytest.raises(PlanError, match="no trajectory is left"):
        harts.plan_step(batch, 1, over_capacity="drop")


def test_an_unknown_way_to_treat_long_trajectories_is_refused() -> None:
    with pytest.raises(PlanError, match="over_capacity is 'skip'; choose 'error' or 'drop'"):
        harts.plan_step(_batch([[1]]), over_capacity="skip")  # type: ignore[arg-type]


def test_an_unknown_planner_is_refused() -> None:
    with pytest.raises(PlanError, match="planner is 'best'; choose 'harts' or 'next-fit'"):
        harts.plan_step(_batch([[1]]), planner="best")  # type: ignore[arg-type]


def test_next_fit_stays_available() -> None:
    batch = _batch([[1, 2, 3, 4], [1, 2, 3, 5], [9, 9]])
    plan = harts.plan_step(batch, 5, planner="next-fit")
    assert plan.compact_tokens_of_microbatch.tolist() == [5, 2]
