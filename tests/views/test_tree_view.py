from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.planner import plan_step
from harts.views.tree import build_tree_view
from tests.strategies import long_token_trees, token_trees, trajectory_batches
from tests.tree.shapes import batch_of, named_shapes
from tests.views.checkers import (
    check_attention,
    check_conv,
    check_linear,
    check_logprobs,
    check_rows,
    check_tree_view,
    truth_of,
)

CPU = torch.device("cpu")
WIDTHS = (1, 2, 3, 4, 5)
some = settings(deadline=None, max_examples=100)
few = settings(deadline=None, max_examples=50)


def microbatches_of(batch, chunk_size, capacity=10**9):
    capacity = max(capacity, int(batch.lengths.max()))
    return plan_step(batch, capacity=capacity, chunk_size=chunk_size)._all


def view_of(microbatch):
    return build_tree_view(microbatch, conv_widths=WIDTHS, device=CPU)


@some
@given(token_trees(vocabulary=3, max_trajectories=10), st.sampled_from([1, 2, 4]))
def test_every_view_of_any_tree_is_right(trajectories, chunk_size):
    (microbatch,) = microbatches_of(batch_of(trajectories), chunk_size)
    check_tree_view(view_of(microbatch), microbatch)


@pytest.mark.parametrize("chunk_size", [4, 8])
@few
@given(st.data())
def test_every_view_of_a_tree_of_several_chunks_is_right(chunk_size, data):
    trajectories = data.draw(long_token_trees(chunk_size=chunk_size, max_trajectories=10))
    (microbatch,) = microbatches_of(batch_of(trajectories), chunk_size)
    check_tree_view(view_of(microbatch), microbatch)


@settings(deadline=None, max_examples=12)
@given(long_token_trees(chunk_size=64, max_trajectories=6))
def test_every_view_at_chunk_size_64_is_right(trajectories):
    (microbatch,) = microbatches_of(batch_of(trajectories), 64)
    check_tree_view(view_of(microbatch), microbatch)


@few
@given(trajectory_batches(with_identity=True), st.integers(1, 20), st.sampled_from([2, 4]))
def test_every_view_of_every_microbatch_is_right(batch, capacity, chunk_size):
    for microbatch in microbatches_of(batch, chunk_size, capacity):
        check_tree_view(view_of(microbatch), microbatch)


@pytest.mark.parametrize("chunk_size", [4, 8])
@pytest.mark.parametrize("name", named_shapes(4))
def test_every_view_of_named_shapes_is_right(name, chunk_size):
    (microbatch,) = microbatches_of(batch_of(named_shapes(chunk_size)[name]), chunk_size)
    check_tree_view(view_of(microbatch), microbatch)


@pytest.mark.parametrize("name", [n for n in named_shapes(4) if "fork" in n])
def test_every_view_of_forks_around_the_boundary_of_64_is_right(name):
    (microbatch,) = microbatches_of(batch_of(named_shapes(64)[name]), 64)
    check_tree_view(view_of(microbatch), microbatch)


@pytest.mark.parametrize("distance", range(6))
@pytest.mark.parametrize("at", [7, 8, 9, 16])
def test_windows_of_forks_near_the_start_of_a_chain_span_several_ancestor_segments(at, distance):
    trunk = [9] * at
    trajectories = [
        [*trunk, 1, 1, 1, 1],
        [*trunk, 2, *[2] * distance, 3, 3],
        [*trunk, 2, *[2] * distance, 4],
        [*trunk, 2, *[2] * distance, 4, 5, 6],
        [*trunk, 2, *[2] * distance, 4, 7],
    ]
    (microbatch,) = microbatches_of(batch_of(trajectories), 8)
    check_tree_view(view_of(microbatch), microbatch)


@pytest.mark.parametrize("width", WIDTHS)
def test_one_window_reads_zeros_before_the_root_and_never_the_neighbouring_chain(width):
    (microbatch,) = microbatches_of(batch_of([[1, 2], [3, 4]]), 4)
    extended = view_of(microbatch).conv[width].extended
    context = [-1] * (width - 1)
    assert extended.source.tolist() == [*context, 0, 1, *context, 2, 3]


@some
@given(trajectory_batches(), st.data())
def test_scored_positions_of_one_row_share_a_head_row_for_each_temperature(batch, data):
    temperature = [
        data.draw(st.lists(st.sampled_from([0.5, 0.7, 1.0, 1.5]), min_size=int(n), max_size=int(n)))
        for n in batch.lengths
    ]
    flat = np.array([t for row in temperature for t in row])
    batch = replace(batch, position_fields=batch.position_fields | {"temperature": flat})
    (microbatch,) = microbatches_of(batch, 4)
    check_tree_view(view_of(microbatch), microbatch, temperatures=temperature)


@some
@given(token_trees(vocabulary=2), st.data())
def test_temperatures_of_whole_trajectories_split_head_rows(trajectories, data):
    drawn = data.draw(
        st.lists(
            st.sampled_from([0.6, 1.0]), min_size=len(trajectories), max_size=len(trajectories)
        )
    )
    (microbatch,) = microbatches_of(batch_of(trajectories, temperature=drawn), 4)
    temperatures = [[t] * len(tokens) for t, tokens in zip(drawn, trajectories, strict=True)]
    check_tree_view(view_of(microbatch), microbatch, temperatures=temperatures)


def test_a_batch_without_scored_positions_needs_no_head_rows():
    batch = batch_of([[1], [2]])
    (microbatch,) = microbatches_of(batch, 4)
    view = view_of(microbatch).logprobs
    assert view.num_positions == len(view.compact_row) == 0
    assert view.row_ptr.tolist() == [0]
    check_tree_view(view_of(microbatch), microbatch)


def check_logprobs_on_both_sides(view, truth, temperatures=None):
    """The view, and what it holds on the host of its tensors and on the device of row_ptr."""
    check_logprobs(view, truth, temperatures)
    assert view.position_ptr.dtype == torch.int64
    assert view.position_ptr.tolist() == view.row_ptr.tolist()
    scored = [
        (rows[t - 1], tokens[t])
        for rows, tokens, mask in zip(truth.rows_of, truth.tokens_of, truth.masks_of, strict=True)
        for t in range(len(mask))
        if mask[t]
    ]
    assert view.last_row == max((row for row, _ in scored), default=-1)
    assert view.smallest_target == min((token for _, token in scored), default=0)
    assert view.largest_target == max((token for _, token in scored), default=-1)


@some
@given(trajectory_batches())
def test_the_host_knows_the_extremes_of_rows_and_targets(batch):
    for microbatch in microbatches_of(batch, 4, capacity=20):
        check_logprobs_on_both_sides(view_of(microbatch).logprobs, truth_of(microbatch))


def test_several_labels_at_one_row_share_one_head_row():
    (microbatch,) = microbatches_of(batch_of([[5, k] for k in range(7)]), 4)
    view = view_of(microbatch).logprobs
    assert view.compact_row.tolist() == [microbatch.layout.semantic_to_compact[0]]
    assert view.target[view.original.argsort()].tolist() == list(range(7))


def test_building_a_view_twice_gives_the_same_indices():
    (microbatch,) = microbatches_of(batch_of(named_shapes(4)["three levels"]), 4)
    first, second = view_of(microbatch), view_of(microbatch)
    for (path, a), (_, b) in zip(indices_of(first), indices_of(second), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b)), path


# Every checker above must notice a wrong entry anywhere, or it proves nothing.


def indices_of(part, path=()) -> Iterator[tuple[tuple, object]]:
    """Every index tensor, tuple of numbers and number of a view, with the way to it."""
    if is_dataclass(part):
        for field in fields(part):
            yield from indices_of(getattr(part, field.name), (*path, field.name))
    elif isinstance(part, tuple) and part and not isinstance(part[0], int):
        for place, entry in enumerate(part):
            yield from indices_of(entry, (*path, place))
    elif isinstance(part, dict):
        for key, entry in part.items():
            yield from indices_of(entry, (*path, key))
    elif part is not None and not (isinstance(part, tuple) and not part):
        yield path, part


def replaced(part, path, value):
    """The view with the index at `path` replaced."""
    if not path:
        return value
    step, *rest = path
    if isinstance(part, tuple):
        return (*part[:step], replaced(part[step], rest, value), *part[step + 1 :])
    return replace(part, **{step: replaced(getattr(part, step), rest, value)})


def changes_of(index):
    """The index with one entry changed, for every entry: by one either way, and to a neighbour."""
    if isinstance(index, int):
        yield from (index + 1, index - 1)
        return
    flat = list(index) if isinstance(index, tuple) else index.flatten().tolist()
    for place, entry in enumerate(flat):
        for other in {entry + 1, entry - 1, flat[place - 1]} - {entry}:
            changed = [*flat[:place], other, *flat[place + 1 :]]
            if isinstance(index, tuple):
                yield tuple(changed)
            elif isinstance(index, np.ndarray):
                yield np.array(changed, dtype=index.dtype)
            else:
                yield torch.tensor(changed, dtype=index.dtype).view(index.shape)


def forest_with_everything():
    """Three rounds, side branches of side branches, a second tree, duplicates, a shared slot."""
    trunk = [9] * 5
    return [
        [*trunk, 1, 1, 1, 1, 1, 1, 1],
        [*trunk, 1, 1, 1, 1, 1, 2],
        [*trunk, 2, 2],
        [*trunk, 2, 3, 3, 3, 3, 1],
        [*trunk, 2, 3, 3, 3, 3, 2],
        [*trunk, 3],
        [*trunk, 3],
        [7, 7, 8],
        [7, 7],
        [7, 6],
    ]


def checks_of(microbatch, view):
    """(part of the view, its checker) for every index that the view holds."""
    truth, num_rounds = truth_of(microbatch), microbatch.calls.num_rounds
    temperatures = [
        [t] * len(tokens)
        for t, tokens in zip(
            microbatch.batch.trajectory_fields["temperature"], truth.tokens_of, strict=True
        )
    ]
    rows = replace(view, attention=None, linear=None, conv={}, logprobs=None)
    return {
        "rows": (rows, lambda part: check_rows(part, truth)),
        "attention": (view.attention, lambda part: check_attention(part, truth)),
        "linear": (
            view.linear,
            lambda part: check_linear(part, truth, chunk_size=4, num_rounds=num_rounds),
        ),
        "conv of width 2": (
            view.conv[2],
            lambda part: check_conv(part, view.linear, truth, width=2),
        ),
        "conv of width 4": (
            view.conv[4],
            lambda part: check_conv(part, view.linear, truth, width=4),
        ),
        "logprobs": (
            view.logprobs,
            lambda part: check_logprobs_on_both_sides(part, truth, temperatures),
        ),
    }


@pytest.mark.parametrize(
    "name", ["rows", "attention", "linear", "conv of width 2", "conv of width 4", "logprobs"]
)
def test_changing_any_single_index_of_a_view_is_noticed(name):
    trajectories = forest_with_everything()
    temperature = [1.0, 0.5] * (len(trajectories) // 2)
    (microbatch,) = microbatches_of(batch_of(trajectories, temperature=temperature), 4)
    assert microbatch.calls.num_rounds == 3
    part, check = checks_of(microbatch, view_of(microbatch))[name]
    check(part)
    changed = 0
    for path, index in indices_of(part):
        assert len(list(changes_of(index))) > 0, path
        for other in changes_of(index):
            changed += 1
            try:
                check(replaced(part, path, other))
            except (AssertionError, IndexError, ValueError, KeyError):
                continue
            pytest.fail(f"{name}.{'.'.join(map(str, path))} = {other} went unnoticed")
    assert changed > 50


def test_every_index_of_every_view_has_entries_that_the_last_test_changes():
    trajectories = forest_with_everything()
    temperature = [1.0, 0.5] * (len(trajectories) // 2)
    (microbatch,) = microbatches_of(batch_of(trajectories, temperature=temperature), 4)
    view = view_of(microbatch)
    linear = dict(indices_of(view.linear))
    named = {path[0] for path in linear}
    assert named == {field.name for field in fields(view.linear)}
    assert all(np.asarray(index).size for index in linear.values())
    assert {path[0] for path, _ in indices_of(view.logprobs)} == {
        field.name for field in fields(view.logprobs)
    }
    assert sum(chain.ancestors != () for chain in view.attention.chains) >= 4
