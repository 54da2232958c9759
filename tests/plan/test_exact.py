from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.errors import PlanError
from harts.plan import jit
from harts.plan.exact import exact_partitions
from harts.plan.sampled import sampled_partitions
from tests.plan.ordered_trees import (
    assert_legal_and_contiguous,
    needs_numba,
    priced_trees,
    random_cost,
    trie_rows,
)

anything = settings(deadline=None, max_examples=80)
either = pytest.mark.parametrize(
    "use_numba", [False, pytest.param(True, marks=needs_numba)], ids=["numpy", "numba"]
)


def best_of_all_contiguous(paths, capacity):
    """{K: least (total work, heaviest work)} over every way to cut the order."""
    num = len(paths)
    work = {(a, b): trie_rows(paths[a:b]) for a, b in combinations(range(num + 1), 2)}
    best = {}
    for k in range(1, num + 1):
        for cuts in combinations(range(1, num), k - 1):
            rows = [work[part] for part in pairwise([0, *cuts, num])]
            if max(rows) <= capacity:
                best[k] = min(best.get(k, (np.inf, np.inf)), (sum(rows), max(rows)))
    return best


@either
@anything
@given(drawn=priced_trees())
def test_exact_search_finds_the_best_contiguous_partition_of_every_count(use_numba, drawn):
    paths, cost, capacity = drawn
    found = exact_partitions(cost, range(1, len(paths) + 3), capacity=capacity, use_numba=use_numba)
    for partition in found.values():
        assert_legal_and_contiguous(partition, paths, capacity)
    values = {k: (int(p.rows.sum()), int(p.rows.max())) for k, p in found.items()}
    assert values == best_of_all_contiguous(paths, capacity)
    assert all(k == len(partition.rows) for k, partition in found.items())


@either
def test_only_the_counts_asked_for_are_returned(use_numba):
    cost = random_cost(5, 20)
    every = exact_partitions(cost, range(1, 21), capacity=30, use_numba=use_numba)
    some = exact_partitions(cost, [3, 12, 15, 40], capacity=30, use_numba=use_numba)
    assert list(some) == [k for k in (3, 12, 15) if k in every]
    for k, partition in some.items():
        assert np.array_equal(partition.microbatch_of_place, every[k].microbatch_of_place)


@either
def test_no_count_is_found_where_none_is_reachable(use_numba):
    cost = random_cost(5, 20)
    assert exact_partitions(cost, [21, 24], capacity=30, use_numba=use_numba) == {}
    assert exact_partitions(cost, [1], capacity=30, use_numba=use_numba) == {}
    assert exact_partitions(cost, [20], capacity=1, use_numba=use_numba) == {}


@needs_numba
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(0, 60))
def test_numba_and_numpy_find_the_same_partitions(seed, num, room):
    cost = random_cost(seed, num)
    capacity = int(cost.lengths.max()) + room
    numpy, numba, again = (
        exact_partitions(cost, range(1, num + 1), capacity=capacity, use_numba=use_numba)
        for use_numba in (False, True, True)
    )
    assert list(numpy) == list(numba) == list(again)
    for k in numpy:
        for other in (numba, again):
            assert np.array_equal(numpy[k].microbatch_of_place, other[k].microbatch_of_place)
            assert np.array_equal(numpy[k].rows, other[k].rows)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 30))
def test_no_sampled_partition_is_cheaper_than_the_exact_one(seed, room):
    cost = random_cost(seed, 40)
    capacity, counts = int(cost.lengths.max()) + room, range(1, 41)
    exact = exact_partitions(cost, counts, capacity=capacity, use_numba=False)
    largest = exact[40]
    sampled = sampled_partitions(cost, largest, counts, capacity=capacity, limit=40)
    for k, partition in sampled.items():
        assert partition.rows.sum() >= exact[k].rows.sum()


def test_asking_for_numba_without_it_is_an_error(monkeypatch):
    monkeypatch.setattr(jit, "HAVE_NUMBA", False)
    with pytest.raises(PlanError, match=r"numba is not installed; pip install 'harts\[plan\]'"):
        exact_partitions(random_cost(0, 4), [2], capacity=100, use_numba=True)
