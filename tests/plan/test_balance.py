import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.balance import balance_slots
from harts.plan.greedy import greedy_candidate
from harts.plan.membership import partition_of
from tests.plan.memberships import (
    assert_legal,
    assert_same,
    cost_of,
    partition_by,
    partitioned_trees,
    slot_maxima,
)
from tests.plan.ordered_trees import needs_numba, random_cost

anything = settings(deadline=None, max_examples=100)


def objective(partition, replicas):
    return partition.rows.sum(), slot_maxima(partition.rows, replicas)


@anything
@given(partitioned_trees(max_trajectories=12), st.integers(1, 3), st.integers(0, 100))
def test_balancing_keeps_plans_legal_and_never_raises_work_or_then_slot_maxima(
    drawn, replicas, iterations
):
    paths, cost, capacity, partition = drawn
    options = dict(capacity=capacity, replicas=replicas, iterations=iterations, use_numba=False)
    even = balance_slots(cost, partition, **options)
    assert_legal(even, paths, capacity)
    assert len(even.rows) == len(partition.rows)
    assert objective(even, replicas) <= objective(partition, replicas)


def test_subtrees_change_sides_at_no_cost():
    # a prompt of three rows that both microbatches hold, and one branch of each length 1..6
    paths = [(0, 0, 0, *([k] * k)) for k in range(1, 7)]
    uneven = partition_by(paths, [0, 0, 0, 1, 1, 1])
    assert uneven.rows.tolist() == [3 + 6, 3 + 15]
    even = balance_slots(cost_of(paths), uneven, capacity=18, replicas=2, use_numba=False)
    assert sorted(even.rows.tolist()) == [3 + 10, 3 + 11]
    assert_legal(even, paths, 18)


@pytest.mark.parametrize("use_numba", [False, pytest.param(True, marks=needs_numba)])
def test_slots_of_greedy_plans_come_closer_and_rows_recount_exactly(use_numba):
    for seed in range(3):
        cost = random_cost(seed, 250, longest=40)
        greedy = greedy_candidate(cost, capacity=160, replicas=4, use_numba=use_numba)
        options = dict(capacity=160, replicas=4, iterations=500, use_numba=use_numba)
        even = balance_slots(cost, greedy, **options)
        recounted = partition_of(cost, even.microbatch_of_place)
        by_first = np.unique(even.microbatch_of_place, return_index=True)[1]
        assert recounted.rows.tolist() == even.rows[np.argsort(by_first)].tolist()
        assert even.rows.max() <= 160
        assert objective(even, 4) < objective(greedy, 4)


@needs_numba
@pytest.mark.parametrize("seed", range(4))
def test_numba_and_python_agree(seed):
    cost = random_cost(seed, 60 + 50 * seed, longest=30)
    start = greedy_candidate(cost, capacity=90, replicas=2)
    options = dict(capacity=90, replicas=2, iterations=200, seed=seed + 1)
    fast = balance_slots(cost, start, **options, use_numba=True)
    assert_same(fast, balance_slots(cost, start, **options, use_numba=False))
    assert_same(fast, balance_slots(cost, start, **options, use_numba=True))
