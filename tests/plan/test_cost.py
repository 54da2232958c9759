from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.cost import PrefixCost, inserted_rows, shared_rows
from harts.plan.jit import kernel
from harts.tree.order import sort_trajectories
from tests.plan.ordered_trees import needs_numba, priced_trees, random_cost, trie_rows
from tests.planner_oracles import common_prefix
from tests.tree.shapes import batch_of, named_shapes

anything = settings(deadline=None, max_examples=100)


@anything
@given(priced_trees())
def test_work_of_an_interval_is_its_unique_prefixes(drawn):
    paths, cost, _ = drawn
    begins, ends = np.triu_indices(len(paths) + 1, k=1)
    expected = [trie_rows(paths[a:b]) for a, b in zip(begins, ends, strict=True)]
    assert cost.interval(begins, ends).tolist() == expected
    assert cost.interval(int(begins[-1]), int(ends[-1])) == expected[-1]
    assert cost.total == trie_rows(paths)


@anything
@given(priced_trees(max_trajectories=6))
def test_splitting_an_interval_costs_the_adjacent_lcp(drawn):
    paths, cost, _ = drawn
    num = len(paths)
    for begin in range(num):
        for cut in range(begin + 1, num):
            for end in range(cut + 1, num + 1):
                parts = cost.interval(begin, cut) + cost.interval(cut, end)
                assert parts - cost.interval(begin, end) == cost.adjacent_lcp[cut]


@anything
@given(priced_trees())
def test_lcp_of_any_two_places_is_their_common_prefix(drawn):
    paths, cost, _ = drawn
    places = np.arange(len(paths))
    expected = [[common_prefix(a, b) for b in paths] for a in paths]
    assert cost.lcp(places[:, None], places).tolist() == expected
    assert cost.lcp(0, int(places[-1])) == expected[0][-1]


@anything
@given(priced_trees(), st.data())
def test_insertion_and_any_set_of_places_match_unique_prefixes(drawn, data):
    paths, cost, _ = drawn
    members = sorted(data.draw(st.sets(st.integers(0, len(paths) - 1), min_size=1)))
    assert cost.rows_of(members) == trie_rows([paths[place] for place in members])
    at = data.draw(st.integers(0, len(members) - 1))
    others = members[:at] + members[at + 1 :]
    before = members[at - 1] if at else -1
    after = members[at + 1] if at + 1 < len(members) else -1
    expected = trie_rows([paths[place] for place in members]) - trie_rows(
        [paths[place] for place in others]
    )
    assert cost.insertion(members[at], before, after) == expected


def test_insertion_broadcasts_over_places_and_neighbours():
    cost = random_cost(3, 12)
    place, before, after = np.arange(3, 7)[:, None], np.array([-1, 0, 2]), np.array([9, -1, 8])
    together = cost.insertion(place, before, after)
    assert together.shape == (4, 3)
    for row in range(4):
        for column in range(3):
            one = cost.insertion(int(place[row, 0]), int(before[column]), int(after[column]))
            assert together[row, column] == one


@pytest.mark.parametrize("use_numba", [False, pytest.param(True, marks=needs_numba)])
@pytest.mark.parametrize("num", [1, 2, 3, 7, 16, 17])
def test_loops_for_kernels_agree_with_the_arrays(num, use_numba):
    cost = random_cost(num, num)
    table = (cost.lengths, cost.minima, cost.level)
    shared, inserted = (kernel(loop, use_numba=use_numba) for loop in (shared_rows, inserted_rows))
    for one in range(num):
        for other in range(num):
            assert shared(*table, one, other) == cost.lcp(one, other)
    for place in range(num):
        for before in range(-1, place):
            for after in [-1, *range(place + 1, num)]:
                expected = cost.insertion(place, before, after)
                assert inserted(*table, place, before, after) == expected


@pytest.mark.parametrize("name", named_shapes(4))
def test_costs_of_named_shapes(name):
    paths = sorted(tuple(tokens) for tokens in named_shapes(4)[name])[:40]
    cost = PrefixCost.of(sort_trajectories(batch_of([list(path) for path in paths])))
    assert cost.total == cost.rows_of(np.arange(len(paths))) == trie_rows(paths)
    cuts = list(range(0, len(paths), 3))
    partition = cost.cut_at(cuts)
    assert partition.rows.tolist() == [
        trie_rows(paths[a:b]) for a, b in pairwise([*cuts, len(paths)])
    ]
    assert partition.microbatch_of_place.tolist() == [place // 3 for place in range(len(paths))]
