import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.natural import natural_partition
from harts.plan.sampled import sample_counts, sampled_partitions
from tests.plan.ordered_trees import (
    assert_legal_and_contiguous,
    groups_of,
    priced_trees,
    random_cost,
    trie_rows,
)

anything = settings(deadline=None, max_examples=100)


def evolve(paths, groups, target, capacity):
    """The paper's words, on tries, from the start for each target; None where it gets stuck."""

    def work(places):
        return trie_rows([paths[p] for p in places])

    while len(groups) > target:
        merges = [
            (work(groups[i]) + work(groups[i + 1]) - work(groups[i] + groups[i + 1]), -i)
            for i in range(len(groups) - 1)
            if work(groups[i] + groups[i + 1]) <= capacity
        ]
        if not merges:
            return None
        i = -max(merges)[1]
        groups = [*groups[:i], groups[i] + groups[i + 1], *groups[i + 2 :]]
    while len(groups) < target:
        splits = [
            (work(group[:cut]) + work(group[cut:]) - work(group), i, cut)
            for i, group in enumerate(groups)
            for cut in range(1, len(group))
        ]
        if not splits:
            return None
        _, i, cut = min(splits)
        groups = [*groups[:i], groups[i][:cut], groups[i][cut:], *groups[i + 1 :]]
    return groups


@anything
@given(priced_trees())
def test_each_count_is_reached_by_repeated_best_merges_or_splits(drawn):
    paths, cost, capacity = drawn
    natural = natural_partition(cost, capacity=capacity)
    counts = list(range(1, len(paths) + 2))
    found = sampled_partitions(cost, natural, counts, capacity=capacity, limit=len(counts))
    expected = {k: evolve(paths, groups_of(natural), k, capacity) for k in counts}
    assert {k: groups_of(partition) for k, partition in found.items()} == {
        k: groups for k, groups in expected.items() if groups is not None
    }
    for partition in found.values():
        assert_legal_and_contiguous(partition, paths, capacity)


def test_merging_goes_on_past_a_pair_that_does_not_fit():
    cost = random_cost(11, 200)
    natural = natural_partition(cost, capacity=12)
    found = sampled_partitions(cost, natural, range(1, 201), capacity=30, limit=200)
    assert min(found) < len(natural.rows) // 2
    assert all(partition.rows.max() <= 30 for k, partition in found.items())


def test_counts_that_are_not_sampled_are_not_built():
    cost = random_cost(2, 100)
    natural = natural_partition(cost, capacity=20)
    counts = list(range(10, 101))
    found = sampled_partitions(cost, natural, counts, capacity=20, limit=8)
    assert set(found) <= set(sample_counts(counts, limit=8))
    assert list(found) == sorted(found)


@anything
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 8))
def test_sampled_counts_keep_within_the_budget_and_both_ends(num, limit, replicas):
    counts = list(range(replicas, replicas * (num + 1), replicas))
    sample = sample_counts(counts, limit=limit)
    assert len(sample) == min(num, limit)
    assert sample == sorted(set(sample) & set(counts))
    assert sample[0] == counts[0]
    if limit > 1:
        assert sample[-1] == counts[-1]


@pytest.mark.parametrize(
    "limit, expected",
    [
        (1, [0]),
        (2, [0, 19]),
        (3, [0, 9, 19]),
        (8, [0, 1, 2, 3, 7, 11, 15, 19]),
        (20, list(range(20))),
    ],
)
def test_half_of_the_budget_is_dense_from_the_smallest_count(limit, expected):
    assert sample_counts(range(20), limit=limit) == expected
