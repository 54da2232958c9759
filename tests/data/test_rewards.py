"""Rewards beside the rollouts: found by group and id, never by an id that could mean two."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.data.read import read
from harts.data.rewards import with_rewards
from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError

Pairs = list[tuple[str, int]]

TWO_TASKS: Pairs = [("t1", 0), ("t1", 1), ("t2", 0), ("t2", 1), ("t2", 1)]
REWARDS = {("t1", 0): 1.0, ("t1", 1): 0.25, ("t2", 0): 0.5, ("t2", 1): 0.75}


def batch_of(pairs: Pairs, **more: list[Any]) -> TrajectoryBatch:
    return TrajectoryBatch.from_rows(
        {"input_ids": [1, 2], "loss_mask": [0, 1], "task_id": task, "trial_id": trial}
        | {name: values[index] for name, values in more.items()}
        for index, (task, trial) in enumerate(pairs)
    )


def written(folder: Path, kind: str) -> Path:
    """The rewards of two tasks, the entries in another order than the rollouts."""
    path = folder / {"object": "r.json", "lines": "r.jsonl", "csv": "r.csv"}[kind]
    entries = [
        {"task_id": task, "trial_id": trial, "reward": reward}
        for (task, trial), reward in reversed(REWARDS.items())
    ]
    if kind == "object":
        nested: dict[str, dict[str, float]] = {}
        for entry in entries:
            nested.setdefault(entry["task_id"], {})[str(entry["trial_id"])] = entry["reward"]
        path.write_text(json.dumps(nested))
    elif kind == "lines":
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    else:
        lines = [f"{e['task_id']},{e['trial_id']},{e['reward']}\n" for e in entries]
        path.write_text("task_id,trial_id,reward\n" + "".join(lines))
    return path


@pytest.mark.parametrize("kind", ["object", "lines", "csv"])
def test_ids_that_repeat_in_every_task_find_the_reward_of_their_own(kind, tmp_path):
    batch = with_rewards(batch_of(TWO_TASKS), written(tmp_path, kind))
    assert batch.trajectory_fields["reward"].tolist() == [REWARDS[pair] for pair in TWO_TASKS]
    # the groups are the same ones, so they stay as they were
    assert batch.trajectory_fields["task_id"].tolist() == [task for task, _ in TWO_TASKS]
    assert "group_id" not in batch.trajectory_fields


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1), st.data())
def test_every_trajectory_gets_the_reward_of_its_group_and_rollout(pairs, data):
    nested: dict[str, dict[str, float]] = {}
    for task, trial in sorted(set(pairs), key=lambda _: data.draw(st.integers())):
        nested.setdefault(task, {})[str(trial)] = data.draw(st.floats(-1, 1))
    batch = with_rewards(batch_of(pairs), nested)
    expected = [nested[task][str(trial)] for task, trial in pairs]
    assert batch.trajectory_fields["reward"].tolist() == expected


BARE = {
    "object": ("r.json", '{"0": 1.0, "1": 0.0}'),
    "lines": ("r.jsonl", '{"trial_id": 0, "reward": 1}\n{"trial_id": 1, "reward": 0}\n'),
    "csv": ("r.csv", "trial_id,reward\n0,1\n1,0\n"),
    "csv with empty tasks": ("r.csv", "task_id,trial_id,reward\n,0,1\n,1,0\n"),
}


@pytest.mark.parametrize("kind", BARE)
def test_a_bare_id_that_several_tasks_have_is_refused(kind, tmp_path):
    name, content = BARE[kind]
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        with_rewards(batch_of(TWO_TASKS), tmp_path / name)
    assert str(caught.value) == (
        f"{tmp_path / name}: trial_id 0 is in 2 groups of the rollouts (task_id t1, t2), its "
        "reward names no group; give task_id, trial_id and reward in each entry, or "
        '{"t1": {"0": 1.0}}'
    )


def test_of_many_groups_a_message_names_three():
    with pytest.raises(DataError, match=r"in 6 groups .*\(task_id t0, t1, t2 and 3 more\)"):
        with_rewards(batch_of([(f"t{n}", 0) for n in range(6)]), {"0": 1.0})


def test_an_id_of_one_task_needs_no_group():
    pairs = [("t1", 0), ("t1", 1), ("t2", 2)]
    batch = with_rewards(batch_of(pairs), {"0": 0.0, "1": 1.0, "2": 2.0})
    assert batch.trajectory_fields["reward"].tolist() == [0, 1, 2]


def test_an_id_that_is_unique_goes_before_one_that_repeats():
    batch = batch_of(TWO_TASKS[:4], trajectory_id=["a", "b", "c", "d"])
    found = with_rewards(batch, {"a": 1, "b": 2, "c": 3, "d": 4, "0": 9})
    assert found.trajectory_fields["reward"].tolist() == [1, 2, 3, 4]


def test_a_reward_of_a_whole_group_serves_all_its_rollouts():
    batch = with_rewards(batch_of(TWO_TASKS), {"t1": 1, "t2": {"0": 3, "1": None}})
    rewards = batch.trajectory_fields["reward"]
    assert rewards[:3].tolist() == [1, 1, 3]
    assert str(rewards[3]) == "nan"


def test_the_right_id_under_the_wrong_group_is_not_found():
    with pytest.raises(DataError, match=r"trajectory 2: .*under 0 or t2 in group t2; add it"):
        with_rewards(batch_of(TWO_TASKS), {"t1": {"0": 1, "1": 1}})


def test_groups_that_the_rollouts_do_not_have_become_theirs(tmp_path):
    lines = [{"group_id": "x", "trial_id": n, "reward": n} for n in (0, 1)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = with_rewards(batch_of([("t1", 0), ("t2", 1)]), tmp_path / "r.jsonl")
    assert batch.trajectory_fields["group_id"].tolist() == ["x", "x"]
    assert batch.trajectory_fields["reward"].tolist() == [0, 1]
    with pytest.raises(
        DataError, match=r"trial_id 0 is in 2 groups .* its reward is for another, x"
    ):
        with_rewards(batch_of(TWO_TASKS), tmp_path / "r.jsonl")


def test_rollouts_without_a_group_cannot_take_one_of_two_rewards():
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 1], "trial_id": 0}]
    with pytest.raises(DataError) as caught:
        with_rewards(TrajectoryBatch.from_rows(rows), {"t1": {"0": 1}, "t2": {"0": 0}})
    assert str(caught.value) == (
        "trajectory 0: rewards has trial_id 0 in 2 groups (t1, t2), the rollout has no group; "
        "give the rollouts a group_id as in that file"
    )


TWICE = {
    "lines": ("r.jsonl", '{"task_id": "a", "trial_id": 0, "reward": 1}\n' * 2),
    "csv": ("r.csv", "task_id,trial_id,reward\na,0,1\na,0,1\n"),
}


@pytest.mark.parametrize("kind", TWICE)
def test_two_rewards_of_one_rollout_are_refused(kind, tmp_path):
    name, content = TWICE[kind]
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"trial_id 0 of task_id a is there twice; give one"):
        with_rewards(batch_of([("a", 0)]), tmp_path / name)


def test_ids_that_nulls_elsewhere_made_floats_are_whole_again(tmp_path):
    rows = [
        {"input_ids": [1, 2], "loss_mask": [0, 1], "uid": group, "trial_id": trial}
        for group, trial in ((7, 0), (7, 1), (8, None))
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = read(path, rewards={"7": {"0": 1, "1": 2}, "8": 3})
    assert batch.trajectory_fields["reward"].tolist() == [1, 2, 3]
