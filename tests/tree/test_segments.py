from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from harts.tree.order import sort_trajectories
from harts.tree.segments import build_segments
from harts.tree.stats import forest_stats
from tests.planner_oracles import brute_segments, prefix_counts
from tests.strategies import long_token_trees, token_trees, trajectory_batches
from tests.tree.shapes import batch_of, named_shapes

anything = settings(deadline=None, max_examples=100)


def paths_of(batch):
    columns = [batch.tokens.tolist()]
    if "identity" in batch.position_fields:
        columns.append(batch.position_fields["identity"].tolist())
    flat = list(zip(*columns, strict=True))
    bounds = batch.offsets.tolist()
    return [tuple(flat[a:b]) for a, b in pairwise(bounds)]


def trie_rows(paths, order):
    """The prefix that each trie row stands for: what each sorted trajectory adds, in order."""
    rows, seen = [], set()
    for i in order.ids.tolist():
        for n in range(1, len(paths[i]) + 1):
            if paths[i][:n] not in seen:
                seen.add(paths[i][:n])
                rows.append(paths[i][:n])
    return rows


def assert_segments_are_the_fork_free_runs(batch):
    paths = paths_of(batch)
    order = sort_trajectories(batch)
    forest = build_segments(order)
    rows = trie_rows(paths, order)
    assert forest.num_rows == len(rows) == len(prefix_counts(paths))
    expected = brute_segments(paths)
    first = [rows[row] for row in forest.first_row.tolist()]
    got = {
        prefix: (
            None if above < 0 else first[above],
            int(forest.start[segment]),
            int(forest.length[segment]),
        )
        for segment, (prefix, above) in enumerate(zip(first, forest.parent.tolist(), strict=True))
    }
    assert got == expected
    assert len(first) == len(expected)
    assert (forest.parent < np.arange(len(first))).all()
    assert forest.first_row.tolist() == sorted(forest.first_row.tolist())
    ends = [rows[row] for row in forest.end_row.tolist()]
    assert ends == [paths[i] for i in order.ids.tolist()]


@anything
@given(token_trees(vocabulary=3) | token_trees(vocabulary=2, max_trajectories=16))
def test_segments_are_the_maximal_fork_free_runs_of_the_trie(trajectories):
    assert_segments_are_the_fork_free_runs(batch_of(trajectories))


@settings(deadline=None, max_examples=20)
@given(long_token_trees(chunk_size=8))
def test_segments_of_long_trajectories_are_the_runs_of_the_trie(trajectories):
    assert_segments_are_the_fork_free_runs(batch_of(trajectories))


@anything
@given(trajectory_batches(with_identity=True))
def test_segments_respect_the_identity_of_rows(batch):
    assert_segments_are_the_fork_free_runs(batch)


@pytest.mark.parametrize("name", named_shapes(4))
def test_segments_of_named_shapes(name):
    assert_segments_are_the_fork_free_runs(batch_of(named_shapes(4)[name]))


def test_a_trajectory_that_ends_inside_another_makes_no_fork():
    forest = build_segments(sort_trajectories(batch_of([[1, 2], [1, 2, 3], [1]])))
    assert forest.parent.tolist() == [-1]
    assert forest.end_row.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", named_shapes(4))
def test_forest_stats_count_the_trie(name):
    batch = batch_of(named_shapes(4)[name])
    segments = brute_segments(paths_of(batch))
    children = dict.fromkeys(segments, 0)
    for above, _, _ in segments.values():
        if above is not None:
            children[above] += 1

    def forks_above(key):
        depth = 0
        while segments[key][0] is not None:
            key, depth = segments[key][0], depth + 1
        return depth

    stats = forest_stats(batch)
    rows = len(prefix_counts(paths_of(batch)))
    assert (stats.trajectories, stats.raw_tokens) == (len(batch), len(batch.tokens))
    assert (stats.trie_tokens, stats.compression) == (rows, len(batch.tokens) / rows)
    assert stats.scored_tokens == len(batch.tokens) - len(batch)
    assert stats.longest == max(batch.lengths)
    assert stats.segments == len(segments)
    assert stats.roots == sum(above is None for above, _, _ in segments.values())
    assert stats.forks == sum(n > 1 for n in children.values())
    assert stats.max_fan_out == max(children.values())
    assert stats.max_fork_depth == max(forks_above(key) for key in segments)
