import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.align import align_to_replicas
from harts.plan.membership import most_shared, neighbours, partition_of
from tests.plan.memberships import assert_legal, assert_same, partitioned_trees
from tests.plan.ordered_trees import groups_of, trie_rows
from tests.planner_oracles import common_prefix

anything = settings(deadline=None, max_examples=100)


@anything
@given(partitioned_trees(), st.permutations(range(5)))
def test_any_labels_give_the_same_partition_with_exact_rows(drawn, names):
    _, cost, _, partition = drawn
    if len(partition.rows) <= len(names):
        renamed = np.array(names)[partition.microbatch_of_place] * 7
        assert_same(partition_of(cost, renamed), partition)


@anything
@given(partitioned_trees())
def test_what_a_place_shares_is_its_longest_common_prefix_with_another_member(drawn):
    paths, cost, _, partition = drawn
    before, after = neighbours(partition.microbatch_of_place)
    shared = most_shared(cost, np.arange(len(paths)), before, after)
    for group in groups_of(partition):
        for place in group:
            others = [common_prefix(paths[place], paths[p]) for p in group if p != place]
            assert shared[place] == max(others, default=0)


@anything
@given(partitioned_trees(), st.integers(1, 5))
def test_alignment_splits_off_the_cheapest_trajectory_each_time(drawn, replicas):
    paths, cost, capacity, partition = drawn
    aligned = align_to_replicas(cost, partition.microbatch_of_place, replicas=replicas)
    groups = groups_of(partition)
    while len(groups) % replicas:
        splits = [(place, k) for k, group in enumerate(groups) for place in group if len(group) > 1]
        if not splits:
            assert aligned is None
            return

        def price(split, groups=groups):
            place, k = split
            rest = [paths[p] for p in groups[k] if p != place]
            alone = trie_rows([paths[place]])
            return trie_rows(rest) + alone - trie_rows([paths[p] for p in groups[k]]), place

        place, k = min(splits, key=price)
        groups[k] = [p for p in groups[k] if p != place]
        groups.append([place])
    assert sorted(map(tuple, groups_of(aligned))) == sorted(map(tuple, groups))
    assert_legal(aligned, paths, capacity, replicas=replicas)
