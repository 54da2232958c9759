import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.natural import natural_partition
from harts.plan.refine import refine_boundaries
from tests.plan.memberships import assert_same, cost_of
from tests.plan.ordered_trees import (
    assert_legal_and_contiguous,
    needs_numba,
    priced_trees,
    random_cost,
    trie_rows,
)

anything = settings(deadline=None, max_examples=100)


def cut_somewhere(cost, capacity, draw):
    """The natural partition with more cuts, drawn."""
    natural = natural_partition(cost, capacity=capacity)
    starts = np.flatnonzero(np.diff(natural.microbatch_of_place, prepend=-1)).tolist()
    more = draw(st.sets(st.integers(0, len(cost) - 1)))
    return cost.cut_at(np.array(sorted({*starts, *more})))


def brute_sweeps(paths, starts, capacity, neighbourhood, sweeps):
    """Every cut in turn, by counting prefixes."""

    def work(a, b):
        return trie_rows(paths[a:b])

    starts = [*starts, len(paths)]
    for _ in range(sweeps):
        for i in range(1, len(starts) - 1):
            a, cut, b = starts[i - 1 : i + 2]
            options = [
                (work(a, t) + work(t, b), max(work(a, t), work(t, b)), t != cut, t)
                for t in range(max(a + 1, cut - neighbourhood), min(b - 1, cut + neighbourhood) + 1)
                if max(work(a, t), work(t, b)) <= capacity
            ]
            starts[i] = min(options)[-1]
    return starts[:-1]


@anything
@given(priced_trees(max_trajectories=10), st.integers(1, 3), st.integers(0, 2), st.data())
def test_cuts_move_to_the_least_work_then_the_lighter_maximum(drawn, nearby, sweeps, data):
    paths, cost, capacity = drawn
    partition = cut_somewhere(cost, capacity, data.draw)
    starts = np.flatnonzero(np.diff(partition.microbatch_of_place, prepend=-1)).tolist()
    options = dict(capacity=capacity, neighbourhood=nearby, sweeps=sweeps, use_numba=False)
    refined = refine_boundaries(cost, partition, **options)
    assert_legal_and_contiguous(refined, paths, capacity)
    expected = brute_sweeps(paths, starts, capacity, nearby, sweeps)
    assert_same(refined, cost.cut_at(np.array(expected)))
    assert len(refined.rows) == len(partition.rows)
    assert refined.rows.sum() <= partition.rows.sum()


@needs_numba
def test_numba_and_python_agree():
    for seed in range(6):
        cost = random_cost(seed, 150)
        natural = natural_partition(cost, capacity=25 + seed)
        fast, slow = (
            refine_boundaries(cost, natural, capacity=25 + seed, use_numba=numba)
            for numba in (True, False)
        )
        assert_same(fast, slow)


def test_a_cut_may_fill_a_microbatch_to_the_last_row():
    # cutting after the second path saves two rows; its left side then has four rows
    paths = [(0, 0, 0), (0, 0, 1), (1,)]
    split_pair = cost_of(paths).cut_at(np.array([0, 1]))
    assert split_pair.rows.tolist() == [3, 4]
    refined = refine_boundaries(cost_of(paths), split_pair, capacity=4, use_numba=False)
    assert refined.rows.tolist() == [4, 1]
