import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.calls import plan_calls
from harts.tree.compact import lay_out
from harts.tree.order import sort_trajectories
from harts.tree.segments import build_segments
from tests.planner_oracles import prefix_counts
from tests.strategies import long_token_trees, token_trees, trajectory_batches
from tests.tree.shapes import batch_of, caterpillar, named_shapes
from tests.tree.test_segments import paths_of

anything = settings(deadline=None, max_examples=100)


def layout_of(batch, choose=None):
    """Lay out with the planner's direct children, or with choose(children of a segment)."""
    order = sort_trajectories(batch)
    forest = build_segments(order)
    if choose is None:
        direct = plan_calls(forest.parent, forest.length, chunk_size=4).direct_child
    else:
        parent = forest.parent.tolist()
        below = [[c for c, p in enumerate(parent) if p == s] for s in range(len(parent))]
        direct = np.array([choose(c) if c else -1 for c in below], dtype=np.int64)
    return lay_out(batch, order, forest, direct), direct


def prefixes_of_rows(layout):
    """The prefix each compact row stands for, read off a preorder: tokens and depths alone."""
    prefixes, path = [], []
    for token, depth in zip(layout.tokens.tolist(), layout.positions.tolist(), strict=True):
        assert depth <= len(path), "preorder: a row follows its parent or a deeper row of it"
        path = [*path[:depth], token]
        prefixes.append(tuple(path))
    return prefixes


def assert_compact(batch, layout, direct, *, pairs=True):
    paths = paths_of(batch)
    counts = prefix_counts(paths)
    assert layout.num_rows == len(counts)
    map_ = layout.semantic_to_compact.tolist()
    prefix_of_row, place = {}, 0
    for path in paths:  # semantic_to_compact: the row of every token is the row of its prefix
        for n in range(1, len(path) + 1):
            assert prefix_of_row.setdefault(map_[place], path[:n]) == path[:n]
            place += 1
    assert place == len(map_)
    assert len(prefix_of_row) == layout.num_rows
    prefixes = [prefix_of_row[row] for row in range(layout.num_rows)]
    assert len(set(prefixes)) == layout.num_rows
    assert layout.tokens.tolist() == [prefix[-1][0] for prefix in prefixes]
    assert layout.positions.tolist() == [len(prefix) - 1 for prefix in prefixes]
    assert layout.multiplicity.tolist() == [counts[prefix] for prefix in prefixes]
    tokens_only = [tuple(step[0] for step in prefix) for prefix in prefixes]
    assert prefixes_of_rows(layout) == tokens_only
    if pairs:
        end = layout.end.tolist()
        for k, upper in enumerate(prefixes):
            for q, lower in enumerate(prefixes):
                assert (k <= q < end[k]) == (lower[: len(upper)] == upper)
    forest = layout.forest
    for segment, child in enumerate(direct.tolist()):
        last = int(layout.first_row[segment] + forest.length[segment])
        if child >= 0:
            assert layout.first_row[child] == last
        assert layout.end_row[segment] == layout.end[layout.first_row[segment]]
        assert (
            layout.compact_row_of_trie_row[forest.first_row[segment]] == (layout.first_row[segment])
        )
    assert layout.tokens.dtype == layout.positions.dtype == layout.end.dtype == np.int32
    assert layout.multiplicity.dtype == layout.semantic_to_compact.dtype == np.int64


@anything
@given(token_trees(vocabulary=3), st.sampled_from([None, min, max]))
def test_rows_lie_in_preorder_and_end_delimits_the_subtree(trajectories, choose):
    batch = batch_of(trajectories)
    assert_compact(batch, *layout_of(batch, choose))


@anything
@given(trajectory_batches(with_identity=True), st.sampled_from([None, max]))
def test_rows_of_another_identity_have_rows_of_their_own(batch, choose):
    assert_compact(batch, *layout_of(batch, choose))


@settings(deadline=None, max_examples=20)
@given(long_token_trees(chunk_size=8))
def test_long_trajectories_lie_in_preorder(trajectories):
    batch = batch_of(trajectories)
    assert_compact(batch, *layout_of(batch))


@pytest.mark.parametrize("choose", [None, min, max], ids=["planned", "first", "last"])
@pytest.mark.parametrize("name", named_shapes(4))
def test_named_shapes_lie_in_preorder(name, choose):
    batch = batch_of(named_shapes(4)[name])
    assert_compact(batch, *layout_of(batch, choose), pairs=len(batch.tokens) < 600)


def test_a_caterpillar_of_thousands_of_rows_needs_no_recursion():
    batch = batch_of(caterpillar(3000)[::50])
    layout, direct = layout_of(batch, max)
    assert layout.num_rows == 3000 + 60
    assert (direct >= 0).sum() == 60


def test_a_tree_of_1500_nested_segments_needs_no_recursion():
    layout, _ = layout_of(batch_of([[0] * n + [1] for n in range(1, 1501)]), min)
    assert layout.num_rows == 1500 + 1500
    assert layout.end.max() == 3000
