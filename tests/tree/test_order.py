from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.tree.order import RangeMinimum, sort_trajectories
from tests.planner_oracles import common_prefix
from tests.strategies import long_token_trees, token_trees
from tests.tree.shapes import LARGEST_TOKEN, batch_of, named_shapes

anything = settings(deadline=None, max_examples=100)


def assert_ordered(order, paths):
    expected = sorted(range(len(paths)), key=lambda i: paths[i])  # stable: equal ones by id
    lcp = [0] + [common_prefix(paths[a], paths[b]) for a, b in pairwise(expected)]
    assert order.ids.tolist() == expected
    assert order.lcp.tolist() == lcp
    assert order.lengths.tolist() == [len(paths[i]) for i in expected]
    assert order.new_rows.tolist() == [
        len(paths[i]) - shared for i, shared in zip(expected, lcp, strict=True)
    ]
    assert {order.ids.dtype, order.lcp.dtype, order.lengths.dtype} == {np.dtype(np.int64)}


@anything
@given(token_trees(vocabulary=3) | long_token_trees(chunk_size=8))
def test_trajectories_are_in_the_order_of_their_token_tuples(trajectories):
    assert_ordered(sort_trajectories(batch_of(trajectories)), [tuple(t) for t in trajectories])


@anything
@given(
    st.lists(
        st.lists(
            st.sampled_from([0, 1, 255, 256, 65535, 2**24, LARGEST_TOKEN - 1, LARGEST_TOKEN]),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=8,
    )
)
def test_token_ids_compare_as_numbers_and_not_as_bytes(trajectories):
    assert_ordered(sort_trajectories(batch_of(trajectories)), [tuple(t) for t in trajectories])


@anything
@given(st.data())
def test_rows_with_another_identity_are_another_prefix(data):
    trajectories = data.draw(token_trees(vocabulary=2))
    identity = [
        data.draw(
            st.lists(
                st.sampled_from([0, 1, 2**32, 2**40]), min_size=len(tokens), max_size=len(tokens)
            )
        )
        for tokens in trajectories
    ]
    paths = [
        tuple(zip(tokens, marks, strict=True))
        for tokens, marks in zip(trajectories, identity, strict=True)
    ]
    assert_ordered(sort_trajectories(batch_of(trajectories, identity=identity)), paths)


def test_identities_that_differ_in_sign_or_high_bits_do_not_merge():
    identity = [[0, 5], [0, -5], [0, 5 + 2**32], [0, -(2**63)], [0, 5]]
    order = sort_trajectories(batch_of([[1, 1]] * 5, identity=identity))
    assert sorted(order.lcp.tolist()) == [0, 1, 1, 1, 2]


def test_one_identity_a_trajectory_lets_nothing_merge():
    marks = [np.full(3, i, np.int64) for i in range(4)]
    order = sort_trajectories(batch_of([[1, 2, 3]] * 4, identity=marks))
    assert order.lcp.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("shared", [0, 1, 1023, 1024, 1025, 5119, 5120, 5121, 30_000])
def test_long_common_prefixes_are_counted_across_comparison_blocks(shared):
    common = np.arange(shared, dtype=np.int32)
    trajectories = [np.append(common, [k] * 3) for k in (1, 2)]
    rows = [{"input_ids": t, "loss_mask": np.zeros(len(t), int)} for t in trajectories]
    batch = type(batch_of([[0]])).from_rows(rows)
    assert sort_trajectories(batch).lcp.tolist() == [0, shared]


@pytest.mark.parametrize("name", named_shapes(4))
def test_named_shapes_are_ordered(name):
    trajectories = named_shapes(4)[name]
    assert_ordered(sort_trajectories(batch_of(trajectories)), [tuple(t) for t in trajectories])


@anything
@given(st.data())
def test_a_sub_order_is_the_order_of_the_subset(data):
    trajectories = data.draw(token_trees(vocabulary=2, max_trajectories=10))
    order = sort_trajectories(batch_of(trajectories))
    chosen = data.draw(st.sets(st.sampled_from(range(len(trajectories))), min_size=1))
    places = np.array(sorted(chosen), dtype=np.int64)
    taken = order.take(places)
    ids = taken.ids.tolist()
    assert ids == order.ids[places].tolist()
    members = sorted(ids)
    assert_ordered(
        type(taken)(
            np.array([members.index(i) for i in ids], dtype=np.int64), taken.lcp, taken.lengths
        ),
        [tuple(trajectories[i]) for i in members],
    )


@anything
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40))
def test_range_minimum_is_the_minimum_of_every_slice(values):
    minimum = RangeMinimum(np.array(values))
    for begin in range(len(values)):
        for end in range(begin + 1, len(values) + 1):
            assert minimum(begin, end) == min(values[begin:end])
