import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.natural import candidate_range, natural_partition
from tests.plan.ordered_trees import (
    assert_legal_and_contiguous,
    groups_of,
    priced_trees,
    random_cost,
    trie_rows,
)
from tests.planner_oracles import common_prefix

anything = settings(deadline=None, max_examples=150)


def split_recursively(paths, places, capacity):
    """The paper's words, on tries: lowest valley, then lighter larger side, then evener sides."""
    if trie_rows([paths[p] for p in places]) <= capacity:
        return [places]

    def price(cut):
        left = trie_rows([paths[p] for p in places[:cut]])
        right = trie_rows([paths[p] for p in places[cut:]])
        valley = common_prefix(paths[places[cut - 1]], paths[places[cut]])
        return valley, max(left, right), abs(left - right), cut

    cut = min(range(1, len(places)), key=price)
    sides = places[:cut], places[cut:]
    return [part for side in sides for part in split_recursively(paths, side, capacity)]


@anything
@given(priced_trees(max_trajectories=10))
def test_the_natural_partition_splits_at_the_lowest_valley_until_all_fit(drawn):
    paths, cost, capacity = drawn
    partition = natural_partition(cost, capacity=capacity)
    assert_legal_and_contiguous(partition, paths, capacity)
    assert groups_of(partition) == split_recursively(paths, list(range(len(paths))), capacity)


def test_a_long_chain_of_splits_needs_no_recursion():
    cost = random_cost(0, 3000, longest=5)
    partition = natural_partition(cost, capacity=5)
    assert partition.rows.max() <= 5
    assert len(partition.rows) > 1000


@anything
@given(priced_trees(), st.integers(1, 4))
def test_candidate_counts_follow_equations_7_and_8(drawn, replicas):
    paths, cost, capacity = drawn
    natural = len(natural_partition(cost, capacity=capacity).rows)
    counts = candidate_range(cost, natural, capacity=capacity, replicas=replicas)
    lowest = replicas * max(1, math.ceil(trie_rows(paths) / (capacity * replicas)))
    highest = max(
        lowest,
        min(replicas * math.ceil(natural / replicas), replicas * (len(paths) // replicas)),
    )
    assert counts == [k for k in range(lowest, highest + 1) if k % replicas == 0]


@pytest.mark.parametrize(
    "num_natural, replicas, expected",
    [(1, 1, [1]), (5, 1, [1, 2, 3, 4, 5]), (5, 4, [4, 8]), (11, 4, [4, 8]), (1, 16, [16])],
)
def test_candidate_counts_of_ten_small_trajectories(num_natural, replicas, expected):
    cost = random_cost(1, 10)
    assert candidate_range(cost, num_natural, capacity=100, replicas=replicas) == expected
