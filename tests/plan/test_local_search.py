import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.greedy import greedy_candidate
from harts.plan.jit import HAVE_NUMBA
from harts.plan.local_search import search_memberships
from harts.plan.membership import partition_of
from harts.plan.natural import natural_partition
from tests.plan.memberships import assert_legal, assert_same, partition_by, partitioned_trees
from tests.plan.ordered_trees import needs_numba, random_cost, trie_rows
from tests.planner_oracles import partitions

anything = settings(deadline=None, max_examples=100)


@anything
@given(partitioned_trees(max_trajectories=12), st.integers(1, 3), st.integers(0, 200))
def test_search_never_adds_work_and_keeps_plans_legal(drawn, replicas, iterations):
    paths, cost, capacity, partition = drawn
    options = dict(capacity=capacity, replicas=replicas, iterations=iterations, use_numba=False)
    found = search_memberships(cost, partition, **options)
    if found is partition:
        return
    assert_legal(found, paths, capacity, replicas=replicas)
    assert found.rows.sum() < partition.rows.sum()


@settings(deadline=None, max_examples=50)
@given(partitioned_trees(max_trajectories=6))
def test_small_trees_come_within_one_trajectory_of_the_least_work_of_any_membership(drawn):
    paths, cost, capacity, _ = drawn
    alone = partition_by(paths, range(len(paths)))
    found = search_memberships(
        cost, alone, capacity=capacity, replicas=1, iterations=400, use_numba=False
    )
    work = [
        [trie_rows([paths[p] for p in group]) for group in groups]
        for groups in partitions(list(range(len(paths))))
    ]
    least = min(sum(rows) for rows in work if max(rows) <= capacity)
    assert least <= found.rows.sum() <= least + max(map(len, paths)) - 1


@pytest.mark.parametrize("use_numba", [False, pytest.param(True, marks=needs_numba)])
def test_search_lowers_the_work_of_greedy_plans_and_recounts_exactly(use_numba):
    improved = 0
    for seed in range(4):
        cost = random_cost(seed, 250, longest=40)
        greedy = greedy_candidate(cost, capacity=160, replicas=2, use_numba=use_numba)
        found = search_memberships(
            cost, greedy, capacity=160, replicas=2, iterations=500, use_numba=use_numba
        )
        assert_same(found, partition_of(cost, found.microbatch_of_place))
        assert found.rows.max() <= 160 and len(found.rows) % 2 == 0
        improved += found.rows.sum() < greedy.rows.sum()
    assert improved == 4


@needs_numba
@pytest.mark.parametrize("seed", range(4))
def test_numba_and_python_agree(seed):
    cost = random_cost(seed, 60 + 50 * seed, longest=30)
    start = natural_partition(cost, capacity=90)
    options = dict(capacity=90, replicas=1, iterations=300, seed=seed + 1)
    fast = search_memberships(cost, start, **options, use_numba=True)
    assert_same(fast, search_memberships(cost, start, **options, use_numba=False))
    assert_same(fast, search_memberships(cost, start, **options, use_numba=True))


def test_more_microbatches_than_needed_are_closed():
    cost = random_cost(1, 40)
    alone = partition_of(cost, cost.lengths.cumsum())
    found = search_memberships(
        cost, alone, capacity=cost.total, replicas=4, iterations=2000, use_numba=HAVE_NUMBA
    )
    assert len(alone.rows) == 40 and len(found.rows) <= 8
