"""Counts of an inspection against sets of prefixes, and against facts about real files."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.data.read import read
from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.inspection.inspect import inspect_batch
from harts.inspection.result import Inspection
from tests.shapes import SHAPES
from tests.strategies import token_trees

FOLDER = Path(__file__).parents[3] / "shared" / "rollouts" / "tokens"


def batch_of(paths: list[list[int]], **fields: list[object]) -> TrajectoryBatch:
    rows = []
    for index, path in enumerate(paths):
        mask = [0] + [(index + place) % 3 == 0 for place in range(1, len(path))]
        row = {"input_ids": path, "loss_mask": [int(bit) for bit in mask]}
        rows.append(row | {name: values[index] for name, values in fields.items()})
    return TrajectoryBatch.from_rows(rows)


def prefixes(paths: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}


def assert_counts(found: Inspection, paths: list[list[int]], chunk: int) -> None:
    """Everything about the trie, from the set of all prefixes."""
    rows = prefixes(paths)
    children = Counter(row[:-1] for row in rows)
    forks = {row: n for row, n in children.items() if n > 1 and row}
    forest, sizes = found.forest, found.trajectories
    assert forest.rows == len(rows)
    assert forest.roots == children[()]
    assert forest.forks == len(forks)
    assert forest.max_fan_out == max(forks.values(), default=0)
    depth = {row: sum(row[:n] in forks for n in range(1, len(row))) for row in rows}
    assert forest.max_fork_depth == max(depth.values())
    assert Counter(len(row) % chunk for row in forks) == Counter(
        {residue: n for residue, n in enumerate(forest.fork_residues) if n}
    )
    # every child of a fork but one starts a chain that replays from the chunk boundary below it
    replay = sum((n - 1) * (len(row) % chunk) for row, n in forks.items())
    assert forest.replay_rows == replay
    assert forest.chains == forest.roots + sum(n - 1 for n in forks.values())
    passing = Counter(tuple(path[:n]) for path in paths for n in range(1, len(path) + 1))
    for entry in found.by_depth:
        own = [row for row in rows if depth[row] == entry.number]
        assert entry.rows == len(own)
        assert entry.raw_tokens == sum(passing[row] for row in own)
        assert entry.compression == entry.raw_tokens / entry.rows
    assert sum(entry.segments for entry in found.by_depth) == forest.segments
    for classes in (found.by_depth, found.by_fan_out):
        assert sum(entry.rows for entry in classes) == len(rows)
        assert sum(entry.raw_tokens for entry in classes) == sum(map(len, paths))
    fan_out = Counter(dict.fromkeys(forks.values(), 0))
    fan_out.update(forks.values())
    assert {e.number: e.segments for e in found.by_fan_out if e.number} == dict(fan_out)
    distinct = {tuple(path) for path in paths}
    assert sizes.duplicates == len(paths) - len(distinct)
    assert sizes.nested == sum(
        any(len(other) > len(path) and other[: len(path)] == path for other in paths)
        for path in paths
    )
    assert sizes.longest.tokens == max(map(len, paths))
    assert sizes.raw_tokens == sum(map(len, paths))


@given(token_trees(), st.integers(1, 9))
def test_counts_are_those_of_the_set_of_prefixes(paths: list[list[int]], chunk: int) -> None:
    batch = batch_of(paths)
    found = inspect_batch(batch, capacity=7, chunk_size=chunk)
    assert_counts(found, paths, chunk)
    masks = [row["loss_mask"] for row in batch.rows()]
    needed = {
        tuple(path[:place])
        for path, mask in zip(paths, masks, strict=True)
        for place in np.flatnonzero(mask).tolist()
    }
    assert found.trajectories.head_rows == len(needed)
    assert found.trajectories.scored_tokens == sum(int(mask.sum()) for mask in masks)
    assert found.trajectories.unscored == sum(not mask.any() for mask in masks)
    over = [(entry.index, entry.tokens) for entry in found.trajectories.over_capacity]
    assert sorted(over) == [(i, len(p)) for i, p in enumerate(paths) if len(p) > 7]
    assert [tokens for _, tokens in over] == sorted((t for _, t in over), reverse=True)


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_are_counted_right(name: str) -> None:
    assert_counts(inspect_batch(batch_of(SHAPES[name])), SHAPES[name], 64)


@given(token_trees(max_trajectories=6), st.data())
def test_each_task_has_a_trie_of_its_own(paths: list[list[int]], data: st.DataObject) -> None:
    task = [data.draw(st.sampled_from(["a", "b", "c"])) for _ in paths]
    trial = [data.draw(st.integers(0, 1)) for _ in paths]
    found = inspect_batch(batch_of(paths, uid=task, trial_id=trial))
    assert found.task_field == "uid"
    assert found.breaks.rollout_field == "trial_id"
    assert found.rollouts == len(set(zip(task, trial, strict=True)))
    assert {entry.name for entry in found.tasks} == set(task)
    for entry in found.tasks:
        own = [path for path, name in zip(paths, task, strict=True) if name == entry.name]
        assert entry.trajectories == len(own)
        assert entry.rows == len(prefixes(own))
        assert entry.raw_tokens == sum(map(len, own))
        assert entry.longest == max(map(len, own))
    ratios = [entry.compression for entry in found.tasks]
    assert ratios == sorted(ratios)
    assert found.task_rows == sum(entry.rows for entry in found.tasks)


def test_without_a_group_the_file_is_one_task() -> None:
    found = inspect_batch(batch_of([[1, 2], [1, 3]]))
    assert found.task_field is None
    assert [(task.name, task.rows, task.rollouts) for task in found.tasks] == [("", 3, 0)]
    assert found.breaks.rollout_field is None
    assert found.rollouts == 0


def test_rows_of_another_identity_are_not_shared() -> None:
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 0], "identity": mark} for mark in (0, 1)]
    assert inspect_batch(TrajectoryBatch.from_rows(rows)).forest.rows == 4


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(PlanError, match="capacity"):
        inspect_batch(batch_of([[1]]), capacity=0)
    with pytest.raises(PlanError, match="chunk_size"):
        inspect_batch(batch_of([[1]]), chunk_size=0)


# file: tasks, rollouts, trajectories, raw tokens, trie, compression, longest, scored tokens,
# sum of the tasks' own tries, trajectories over 65,536 tokens
FACTS = {
    "tau_airline_step_plain": (6, 24, 229, 1_187_905, 51_515, 23.059, 8_409, 13_749, 70_698, 0),
    "tau_airline_step_qwen3": (6, 24, 229, 1_188_821, 64_687, 18.378, 8_413, 14_665, 83_870, 0),
    "claude_code_step_qwen3": (4, 11, 69, 1_230_741, 274_916, 4.477, 88_669, 21_955, None, 4),
    "tiny_tau": (2, 8, 48, 15_625, 4_142, 3.772, 583, 1_512, 4_247, 0),
}


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no real rollouts beside this checkout")
@pytest.mark.parametrize("name", FACTS)
def test_real_files_have_the_published_numbers(name: str) -> None:
    tasks, rollouts, count, raw, trie, ratio, longest, scored, task_rows, over = FACTS[name]
    found = inspect_batch(read(FOLDER / f"{name}.jsonl.xz"))
    sizes = found.trajectories
    assert (len(found.tasks), found.rollouts, sizes.count) == (tasks, rollouts, count)
    assert (sizes.raw_tokens, found.forest.rows) == (raw, trie)
    assert round(found.compression, 3) == ratio
    assert (sizes.longest.tokens, sizes.scored_tokens) == (longest, scored)
    assert task_rows in (None, found.task_rows)
    assert len(sizes.over_capacity) == over
