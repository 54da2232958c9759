import json
import lzma
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data.trajectory import TrajectoryBatch
from harts.errors import ConfigError, DataError
from harts.rl.advantages import group_advantages, leave_one_out_advantages
from tests.rl import oracles

TOKEN_FILES = pathlib.Path(__file__).resolve().parents[3] / "shared" / "rollouts" / "tokens"


def batch_of(rewards, groups, rollouts=None):
    rows = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        row = {"input_ids": [1, 2], "loss_mask": [0, 1], "reward": reward, "group_id": group}
        rows.append(row if rollouts is None else row | {"rollout_id": rollouts[i]})
    return TrajectoryBatch.from_rows(rows)


@st.composite
def rated_rollouts(draw):
    """Trajectories of rollouts; a rollout's reward is known or None for all its trajectories."""
    reward = st.none() | st.sampled_from([0.0, 1.0, 0.5, -2.25])
    rollouts = draw(st.lists(st.tuples(st.sampled_from("ab"), reward), min_size=1, max_size=6))
    owners = draw(st.lists(st.integers(0, len(rollouts) - 1), min_size=1, max_size=12))
    return (
        [rollouts[o][1] for o in owners],
        [rollouts[o][0] for o in owners],
        [f"trial-{o}" for o in owners],
    )


@settings(max_examples=60, deadline=None)
@given(rated_rollouts())
def test_group_advantages_equal_a_loop_over_groups(drawn):
    rewards, groups, rollouts = drawn
    actual = group_advantages(batch_of(rewards, groups, rollouts))
    expected = oracles.group_advantages(rewards, groups, rollouts, 1e-6)
    # Equal rewards may miss their mean by a rounding, which epsilon = 1e-6 magnifies.
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(rated_rollouts())
def test_leave_one_out_subtracts_the_mean_of_the_other_rollouts(drawn):
    rewards, groups, rollouts = drawn
    actual = leave_one_out_advantages(batch_of(rewards, groups, rollouts))
    for i, reward in enumerate(rewards):
        others = {
            rollouts[j]: rewards[j]
            for j in range(len(rewards))
            if groups[j] == groups[i] and rollouts[j] != rollouts[i] and rewards[j] is not None
        }
        known = reward is not None and others
        expected = reward - sum(others.values()) / len(others) if known else 0.0
        assert actual[i] == pytest.approx(expected, abs=1e-12)


def test_a_rollout_of_many_trajectories_counts_once():
    batch = batch_of([1.0, 1.0, 1.0, 0.0], ["t"] * 4, [0, 0, 0, 1])
    np.testing.assert_allclose(group_advantages(batch, epsilon=0.0), [1, 1, 1, -1])
    np.testing.assert_allclose(
        group_advantages(batch, normalise="none", unit="trajectory"), [0.25, 0.25, 0.25, -0.75]
    )


def test_the_same_trial_id_in_two_groups_is_two_rollouts():
    batch = batch_of([1.0, 0.0, 3.0, 1.0], ["s", "s", "t", "t"], [0, 1, 0, 1])
    np.testing.assert_allclose(group_advantages(batch, normalise="none"), [0.5, -0.5, 1, -1])


def test_without_rollout_ids_every_trajectory_is_a_rollout():
    batch = batch_of([1.0, 1.0, 0.0, 0.0], [7, 7, 7, 7])
    np.testing.assert_allclose(group_advantages(batch, epsilon=0.0), [1, 1, -1, -1])


def test_equal_rewards_give_zero_even_without_epsilon():
    assert not group_advantages(batch_of([1.0, 1.0], ["t", "t"]), epsilon=0.0).any()
    assert not group_advantages(batch_of([None, None], ["t", "t"])).any()


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [1.0, None]], ids=["unequal", "partly-missing"])
def test_unequal_rewards_within_a_rollout_are_refused(rewards):
    batch = batch_of(rewards, ["t", "t"], [0, 0])
    with pytest.raises(DataError, match=r"trajectory 1: reward is .* same rollout has 1\.0"):
        group_advantages(batch)


def test_missing_fields_and_wrong_options_are_refused():
    plain = TrajectoryBatch.from_rows([{"input_ids": [1, 2], "loss_mask": [0, 1], "note": "x"}])
    with pytest.raises(DataError, match=r"'reward'.*present: note"):
        group_advantages(plain)
    batch = batch_of([1.0, 2.0], ["t", None])
    with pytest.raises(DataError, match="trajectory 1: group_id is missing"):
        group_advantages(batch)
    with pytest.raises(ConfigError, match="unit is 'turn'"):
        group_advantages(batch, unit="turn")
    with pytest.raises(ConfigError, match="normalise is 'max'"):
        group_advantages(batch, normalise="max")
    with pytest.raises(ConfigError, match="epsilon is -1"):
        group_advantages(batch, epsilon=-1)


@pytest.mark.parametrize(
    "name",
    ["tau_airline_step_plain", "tau_airline_step_qwen3", "claude_code_step_qwen3", "tiny_tau"],
)
def test_the_advantages_of_real_rollouts_are_reproduced(name):
    path = TOKEN_FILES / f"{name}.jsonl.xz"
    if not path.exists():
        pytest.skip(f"{path} is not here; the real rollouts lie outside the repository")
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    expected = [row["advantages"][0] for row in rows]
    # The tokens do not matter here; two of them keep the test quick.
    kept = ("group_id", "rollout_id", "reward")
    batch = TrajectoryBatch.from_rows(
        [{"input_ids": [0, 0], "loss_mask": [0, 1]} | {k: row[k] for k in kept} for row in rows]
    )
    # The files hold six decimals.
    np.testing.assert_allclose(group_advantages(batch), expected, rtol=0, atol=5.01e-7)
