"""Orders that the membership planners are tested on, with their paths as tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from harts.plan.cost import PrefixCost
from harts.plan.jit import HAVE_NUMBA
from harts.tree.order import TrajectoryOrder, sort_trajectories
from tests.planner_oracles import prefix_counts
from tests.strategies import token_trees
from tests.tree.shapes import batch_of

needs_numba = pytest.mark.skipif(not HAVE_NUMBA, reason="numba is not installed")


@st.composite
def priced_trees(draw, *, max_trajectories=8):
    """Paths in lexicographic order, their costs, and a capacity that each of them fits."""
    paths = sorted(map(tuple, draw(token_trees(max_trajectories=max_trajectories, vocabulary=3))))
    cost = PrefixCost.of(sort_trajectories(batch_of([list(path) for path in paths])))
    capacity = max(map(len, paths)) + draw(st.integers(0, 3) | st.integers(0, 40))
    return paths, cost, capacity


def random_cost(seed, num, *, longest=9):
    """Costs of a made-up order: any neighbours may share any rows that both have."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, num)
    lcp = np.zeros(num, np.int64)
    lcp[1:] = rng.integers(0, np.minimum(lengths[1:], lengths[:-1]) + 1)
    return PrefixCost.of(TrajectoryOrder(np.arange(num), lcp, lengths))


def trie_rows(paths):
    """Work by definition: unique prefixes."""
    return len(prefix_counts(paths))


def groups_of(partition):
    """Places of each microbatch, in order of its index."""
    membership = partition.microbatch_of_place
    return [np.flatnonzero(membership == k).tolist() for k in range(len(partition.rows))]


def assert_legal_and_contiguous(partition, paths, capacity):
    """Every place once, no empty microbatch, exact rows, within the capacity, in order."""
    groups = groups_of(partition)
    assert [place for group in groups for place in group] == list(range(len(paths)))
    assert all(groups)
    rows = [trie_rows([paths[place] for place in group]) for group in groups]
    assert partition.rows.tolist() == rows
    assert max(rows) <= capacity
    assert {partition.rows.dtype, partition.microbatch_of_place.dtype} == {np.dtype(np.int64)}
