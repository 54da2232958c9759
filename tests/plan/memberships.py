"""Partitions with any membership, drawn and checked on tries of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from harts.plan.cost import PrefixCost
from harts.plan.partition import Partition
from harts.tree.order import sort_trajectories
from tests.plan.ordered_trees import groups_of, priced_trees, trie_rows
from tests.tree.shapes import batch_of


@st.composite
def partitioned_trees(draw, *, max_trajectories=8):
    """Paths in order, their costs, a capacity, and a partition within it of any membership."""
    paths, cost, capacity = draw(priced_trees(max_trajectories=max_trajectories))
    labels = draw(
        st.lists(st.integers(0, 4), min_size=len(paths), max_size=len(paths))
        | st.just(list(range(len(paths))))
    )
    partition = partition_by(paths, labels)
    assume(partition.rows.max() <= capacity)
    return paths, cost, capacity, partition


def partition_by(paths, labels):
    """The partition of given labels, ids in order of first appearance."""
    ids = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    groups = [[p for p, n in zip(paths, labels, strict=True) if n == label] for label in ids]
    return Partition(
        np.array([ids[label] for label in labels], np.int64),
        np.array([trie_rows(group) for group in groups], np.int64),
    )


def cost_of(paths):
    """Costs of ascending paths."""
    return PrefixCost.of(sort_trajectories(batch_of([list(path) for path in paths])))


def assert_legal(partition, paths, capacity, *, replicas=1):
    """Every place in one microbatch, none empty, exact rows within the capacity, K aligned."""
    groups = groups_of(partition)
    assert sorted(place for group in groups for place in group) == list(range(len(paths)))
    assert all(groups)
    assert len(groups) % replicas == 0
    assert partition.rows.tolist() == [trie_rows([paths[p] for p in group]) for group in groups]
    assert partition.rows.max() <= capacity
    assert {partition.rows.dtype, partition.microbatch_of_place.dtype} == {np.dtype(np.int64)}


def assert_same(one, other):
    assert one.microbatch_of_place.tolist() == other.microbatch_of_place.tolist()
    assert one.rows.tolist() == other.rows.tolist()


def slot_maxima(rows, replicas):
    """The second term of Equation 4 for sorted blocks."""
    return sum(sorted(np.asarray(rows).tolist(), reverse=True)[::replicas])
